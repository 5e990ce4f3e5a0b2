"""Which shared libraries files need, as the dynamic linker finds them."""

import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

_RESOLVED = re.compile(r"(/\S+) \(0x")
# ldd's time is the linker's; a long argument list is a matter of the kernel's limit.
_AT_ONCE = 50


def libraries(files: Iterable[Path]) -> dict[str, Path]:
    """By the path under which each is looked for, where it lies; `files` themselves left out."""
    wanted = [str(file) for file in files]
    found: dict[str, Path] = {}
    for start in range(0, len(wanted), _AT_ONCE):
        # A file that is no dynamic program makes ldd end with 1, and says nothing of the others.
        done = subprocess.run(
            ["ldd", *wanted[start : start + _AT_ONCE]],
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
        )
        for name in _RESOLVED.findall(done.stdout):
            found[os.path.normpath(name)] = Path(name).resolve()
    return found


def elf_files(folder: Path) -> Iterator[Path]:
    """Programs and shared libraries below `folder`."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and _is_elf(path):
            yield path


def _is_elf(path: Path) -> bool:
    with path.open("rb") as opened:
        return opened.read(4) == b"\x7fELF"
