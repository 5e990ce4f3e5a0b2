"""Builds what images/tandem-vllm-storage.Dockerfile puts into /packages, without a container.

The instructions are read from the Dockerfile itself. uv takes the place of pip, whose options it
knows, so that wheels can be chosen for another machine.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
DOCKERFILE: Final = ROOT / "images/tandem-vllm-storage.Dockerfile"
_UV: Final = ROOT / ".venv-boot/bin/uv"
_PACKAGES: Final = "/packages"


def steps() -> Iterator[tuple[str, str]]:
    """Name and value of each instruction of the build stage, lines that go on joined."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    stage = re.split(r"^FROM .*$", text, flags=re.MULTILINE)[1]
    for line in stage.splitlines():
        if line.strip() and not line.startswith("#"):
            instruction, _, value = line.partition(" ")
            yield instruction, value


def build_packages(target: Path, *options: str) -> Path:
    """Make `target` the image's /packages. `options`: of uv, which choose the machine."""
    target.mkdir(parents=True, exist_ok=True)
    wheels = target.with_name(f"{target.name}-wheels")
    places = {_PACKAGES: target, "/wheels": wheels}
    for instruction, value in steps():
        if instruction == "COPY":
            source, destination = value.split()
            if destination.startswith(f"{_PACKAGES}/"):
                name = destination.removeprefix(f"{_PACKAGES}/")
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / source, target / name, ignore=ignore)
            else:
                places[destination] = ROOT / source
        else:
            assert instruction == "RUN", instruction
            _run(value, places, options)
    shutil.rmtree(wheels)
    return target


def _run(script: str, places: dict[str, Path], options: tuple[str, ...]) -> None:
    # This machine's cache serves as well as a download.
    script = script.replace("--no-cache-dir", "")
    for place, path in places.items():
        script = re.sub(rf"(?<=\s){re.escape(place)}\b", shlex.quote(str(path)), script)
    words = shlex.join([str(_UV), "pip", "install", "--quiet", *options])
    shell = f'pip() {{ shift; {words} "$@"; }}\n{script}'
    subprocess.run(["bash", "-c", shell], check=True)
