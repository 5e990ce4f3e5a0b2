"""Engines that are processes of this machine: how they were started, what joins them."""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tandem_planner.fabrics import Fabric

from .declared import read_command
from .facts import Declared

_PROC: Final = Path("/proc")
_VERBS: Final = "/dev/infiniband/uverbs"
"""Open in a process that uses RDMA."""
_UCX: Final = "libucp"
_SEGMENT: Final = re.compile(r" (\S+) (\d+) +(?:/SYSV|/dev/shm/ucx_shm|/memfd:ucx)")
"""Device and inode of memory that UCX shares (System V, POSIX, memfd), in /proc/PID/maps."""
_CONNECTED: Final = frozenset({"01", "08"})
"""States in /proc/net/tcp: established, and with the other side gone."""


def declared(group: int) -> Declared | None:
    """The engine of a process group; None when it cannot be read, or none is in there."""
    for pid in _members().get(group, ()):
        words = _words(pid, "cmdline")
        if any(word.startswith("--kv-transfer-config") for word in words) or "--model" in words:
            pairs = (word.partition("=") for word in _words(pid, "environ"))
            return read_command(words, {name: value for name, _, value in pairs})
    return None


@dataclass(frozen=True, slots=True)
class _Open:
    """What the processes with UCX of one group have open."""

    rdma: bool
    segments: frozenset[tuple[str, str]]
    connections: frozenset[tuple[str, str]]
    """(own end, other end)."""


def fabrics(groups: Collection[int]) -> Mapping[int, frozenset[Fabric] | None]:
    """What joins each process group with the others by UCX; None where no process of it uses UCX,
    or none may be looked into.

    A segment counts that another group has mapped too, and a connection whose other end is
    another group's: UCX listens and prepares segments of its own whatever it will use.
    """
    members, connections = _members(), _connections()
    seen = {group: _open(members.get(group, ()), connections) for group in groups}
    found: dict[int, frozenset[Fabric] | None] = {}
    for group, own in seen.items():
        if own is None:
            found[group] = None
            continue
        others = [other for g, other in seen.items() if g != group and other is not None]
        used = {Fabric.RDMA} if own.rdma else set()
        if any(own.segments & other.segments for other in others):
            used.add(Fabric.SHARED_MEMORY)
        back = {(there, here) for here, there in own.connections}
        if any(back & other.connections for other in others):
            used.add(Fabric.TCP)
        found[group] = frozenset(used)
    return found


def _open(pids: Collection[int], connections: Mapping[str, tuple[str, str]]) -> _Open | None:
    maps = {pid: _text(_PROC / str(pid) / "maps") for pid in pids}
    with_ucx = {pid: text for pid, text in maps.items() if _UCX in text}
    if not with_ucx:
        return None
    files = [name for pid in with_ucx for name in _open_files(pid)]
    sockets = (name.removeprefix("socket:[")[:-1] for name in files if name.startswith("socket:["))
    return _Open(
        any(name.startswith(_VERBS) for name in files),
        frozenset((m[1], m[2]) for text in with_ucx.values() for m in _SEGMENT.finditer(text)),
        frozenset(connections[inode] for inode in sockets if inode in connections),
    )


def _connections() -> Mapping[str, tuple[str, str]]:
    """Inode of a connected socket → its two ends, as the kernel writes them."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in _text(_PROC / "net" / table).splitlines()[1:]:
            fields = line.split()
            if fields[3] in _CONNECTED:
                found[fields[9]] = fields[1], fields[2]
    return found


def _members() -> Mapping[int, list[int]]:
    """Process group → its processes."""
    found: dict[int, list[int]] = {}
    for pid in sorted(int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()):
        # After the name, which may hold anything: state, parent, group.
        fields = _text(_PROC / str(pid) / "stat").rpartition(")")[2].split()
        if len(fields) > 2:
            found.setdefault(int(fields[2]), []).append(pid)
    return found


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
