"""Builds what images/tandem-vllm-storage.Dockerfile puts into /packages, without a container.

The steps are read from the Dockerfile itself. uv takes the place of pip, whose options it knows, so
that wheels can be chosen for another Python and another machine.
"""

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
DOCKERFILE: Final = ROOT / "images/tandem-vllm-storage.Dockerfile"
_UV: Final = ROOT / ".venv-boot/bin/uv"
_PACKAGES: Final = "/packages"


def steps() -> list[list[str]]:
    """The instructions of the build stage as words, lines that go on joined."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    stage = re.split(r"^FROM .*$", text, flags=re.MULTILINE)[1]
    return [shlex.split(line) for line in stage.splitlines() if line.strip()]


def build_packages(target: Path, *python: str) -> Path:
    """Make `target` the image's /packages. `python`: uv's options that choose the interpreter."""
    target.mkdir(parents=True, exist_ok=True)
    copied: dict[str, Path] = {}
    for instruction, *words in steps():
        if instruction == "COPY":
            source, destination = ROOT / words[0], words[1]
            copied[destination] = source
            if destination.startswith(f"{_PACKAGES}/"):
                name = destination.removeprefix(f"{_PACKAGES}/")
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, target / name, ignore=ignore)
        else:
            assert (instruction, words[:2]) == ("RUN", ["pip", "install"]), words
            places = {_PACKAGES: target, **copied}
            arguments = [str(places.get(word, word)) for word in words[2:]]
            # This machine's cache serves as well as a download.
            arguments.remove("--no-cache-dir")
            command = [_UV, "pip", "install", "--quiet", *python, *arguments]
            subprocess.run(command, check=True)
    return target
