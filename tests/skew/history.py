"""Files of an older version, from this repository's history."""

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from ..cluster.fixtures import LEFT_OUT

OLDEST = "659c4703d95c"
"""The oldest version whose processes must work beside today's, and whose pods an upgrade leaves
alone: a commit until there is a release, then the last release's tag (docs/run/kubernetes.md)."""
ROOT = Path(__file__).parents[2]


def file_of_older_version(path: str) -> str:
    """The content of a file; where the clone lacks the commit, the test is skipped."""
    return _git("show", f"{OLDEST}:{path}").decode()


def extract_older_version(folder: Path, *paths: str) -> None:
    """Write the files below `paths` into `folder`; skips as `file_of_older_version` does."""
    archive = folder / "older.tar"
    archive.write_bytes(_git("archive", OLDEST, *paths))
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")


def _git(*arguments: str) -> bytes:
    if shutil.which("git") is None:
        pytest.skip(f"{LEFT_OUT}NO git. TO RUN THEM: INSTALL IT")
    ended = subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, check=False)
    if ended.returncode != 0:
        pytest.skip(
            f"{LEFT_OUT}NO COMMIT {OLDEST} IN THIS CHECKOUT. TO RUN THEM: git fetch --unshallow"
        )
    return ended.stdout
