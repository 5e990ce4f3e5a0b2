"""Engines that are processes of this machine: how they were started, what they have open."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tandem_planner.fabrics import Fabric

from .declared import read_command
from .facts import Declared

_PROC: Final = Path("/proc")
_VERBS: Final = "/dev/infiniband/uverbs"
"""Open in a process that uses RDMA."""
_SEGMENTS: Final = ("/dev/shm/ucx_shm", "/memfd:ucx")  # noqa: S108 - as UCX names them
_UCX: Final = "libucp"


def declared(group: int) -> Declared | None:
    """The engine of a process group; None when it cannot be read, or none is in there."""
    for pid in _members(group):
        words = _words(pid, "cmdline")
        if any(word.startswith("--kv-transfer-config") for word in words) or "--model" in words:
            pairs = (word.partition("=") for word in _words(pid, "environ"))
            return read_command(words, {name: value for name, _, value in pairs})
    return None


def fabrics(group: int) -> frozenset[Fabric] | None:
    """What UCX in the process group has open; None when no process of it uses UCX, or none may be
    looked into."""
    found: set[Fabric] = set()
    uses_ucx = False
    for pid in _members(group):
        maps = _text(_PROC / str(pid) / "maps")
        if _UCX not in maps:
            continue
        uses_ucx = True
        open_files = set(_open_files(pid))
        if any(name.startswith(_VERBS) for name in open_files):
            found.add(Fabric.RDMA)
        if any(segment in maps for segment in _SEGMENTS):
            found.add(Fabric.SHARED_MEMORY)
        if any(name.startswith("socket:") for name in open_files):
            found.add(Fabric.TCP)
    return frozenset(found) if uses_ucx else None


def _members(group: int) -> Iterator[int]:
    for entry in sorted(_PROC.iterdir()):
        if entry.name.isdigit():
            # After the name, which may hold anything: state, parent, group.
            fields = _text(entry / "stat").rpartition(")")[2].split()
            if len(fields) > 2 and fields[2] == str(group):
                yield int(entry.name)


def _words(pid: int, what: str) -> list[str]:
    return [word for word in _text(_PROC / str(pid) / what).split("\0") if word]


def _open_files(pid: int) -> Iterator[str]:
    try:
        for link in (_PROC / str(pid) / "fd").iterdir():
            yield os.readlink(link)
    except OSError:  # it ended, or is another user's
        return


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it ended, or is another user's
        return ""
