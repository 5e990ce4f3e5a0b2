"""Find the shared libraries that files need, as the dynamic linker does."""

import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

_RESOLVED = re.compile(r"(/\S+) \(0x")
# Files per call of ldd: keeps the argument list below the kernel's limit.
_BATCH = 50


def libraries(files: Iterable[Path]) -> dict[str, Path]:
    """Shared libraries that `files` need: path that the linker looks up → real file.

    `files` themselves are not included.
    """
    names = [str(file) for file in files]
    resolved: dict[str, Path] = {}
    for start in range(0, len(names), _BATCH):
        # ldd exits with 1 if one file is not dynamically linked; the other files are still listed.
        process = subprocess.run(
            ["ldd", *names[start : start + _BATCH]],
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
        )
        for path in _RESOLVED.findall(process.stdout):
            resolved[os.path.normpath(path)] = Path(path).resolve()
    return resolved


def elf_files(folder: Path) -> Iterator[Path]:
    """Programs and shared libraries below `folder`."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and _is_elf(path):
            yield path


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"
