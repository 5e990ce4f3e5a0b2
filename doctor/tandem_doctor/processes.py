"""Engines that run as processes of this machine: their command lines, and the fabrics that connect
them, as /proc shows both."""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tandem_planner.fabrics import Fabric

from .engine_command import parse_command
from .facts import EngineCommand, MachinePorts

_PROC: Final = Path("/proc")
_SYS: Final = Path("/sys/class")
_VERBS: Final = "/dev/infiniband/uverbs"
"""Device files that a process with RDMA connections has open."""
_UCX: Final = "libucp"
"""Library that a process with UCX has mapped."""
_SEGMENT: Final = re.compile(r" (\S+) (\d+) +(?:/SYSV|/dev/shm/ucx_shm|/memfd:ucx)")
"""Device and inode of UCX's shared memory (System V, POSIX, memfd), in /proc/PID/maps."""
_CONNECTED: Final = frozenset({"01", "08"})
"""States in /proc/net/tcp: ESTABLISHED and CLOSE_WAIT."""
_LISTENING: Final = "0A"
_RANGE_ENDS: Final = 2


def engine_command(group: int) -> EngineCommand | None:
    """Command line and environment of the engine in a process group.

    None if the group has no engine, or this user may not read its processes.
    """
    for pid in _members().get(group, ()):
        words = _words(pid, "cmdline")
        # The flags identify the engine among the group's processes (init, sidecar, workers).
        if any(word.startswith("--kv-transfer-config") for word in words) or "--model" in words:
            pairs = (word.partition("=") for word in _words(pid, "environ"))
            return parse_command(words, {name: value for name, _, value in pairs})
    return None


@dataclass(frozen=True, slots=True)
class _UcxResources:
    """Devices, shared memory and connections that one group's processes with UCX have open."""

    rdma: bool
    segments: frozenset[tuple[str, str]]
    """(device, inode) of shared memory."""
    connections: frozenset[tuple[str, str]]
    """(local address, remote address) of TCP connections."""


def ucx_fabrics(groups: Collection[int]) -> Mapping[int, frozenset[Fabric] | None]:
    """The fabrics by which UCX connects each process group with the other groups.

    None for a group if no process of it uses UCX, or this user may not read its processes. UCX
    listens and creates shared memory whether it will use them or not; so a memory segment counts
    only if another group has mapped it too, and a connection only if it ends in another group.
    """
    members, connections = _members(), _connections()
    resources = {group: _ucx_resources(members.get(group, ()), connections) for group in groups}
    fabrics: dict[int, frozenset[Fabric] | None] = {}
    for group, own in resources.items():
        if own is None:
            fabrics[group] = None
            continue
        others = [other for g, other in resources.items() if g != group and other is not None]
        used = {Fabric.RDMA} if own.rdma else set()
        # Device and inode identify a segment in every process that has mapped it.
        if any(own.segments & other.segments for other in others):
            used.add(Fabric.SHARED_MEMORY)
        # The same connection as its other end sees it.
        reversed_ends = {(remote, local) for local, remote in own.connections}
        if any(reversed_ends & other.connections for other in others):
            used.add(Fabric.TCP)
        fabrics[group] = frozenset(used)
    return fabrics


def network_devices() -> frozenset[str]:
    """The network devices of this machine as UCX names them: `mlx5_0:1` for a port of an RDMA
    device, `eth0` for an interface."""
    ports = (_SYS / "infiniband").glob("*/ports/*")
    interfaces = (_SYS / "net").glob("*")
    return frozenset(
        {f"{port.parent.parent.name}:{port.name}" for port in ports}
        | {interface.name for interface in interfaces}
    )


def listening_ports(group: int) -> frozenset[int] | None:
    """TCP ports at which the processes of a group that use UCX listen; None if none uses it."""
    pids = [pid for pid in _members().get(group, ()) if _UCX in _text(_PROC / str(pid) / "maps")]
    if not pids:
        return None
    port_by_inode = {
        inode: _port(local) for inode, state, local, _ in _sockets() if state == _LISTENING
    }
    inodes = {
        name.removeprefix("socket:[")[:-1]
        for pid in pids
        for name in _open_files(pid)
        if name.startswith("socket:[")
    }
    return frozenset(port for inode, port in port_by_inode.items() if inode in inodes)


def machine_ports() -> MachinePorts | None:
    """The TCP ports of this machine; None if it does not tell its ephemeral ports."""
    text = _text(_PROC / "sys/net/ipv4/ip_local_port_range").split()
    if len(text) != _RANGE_ENDS:
        return None
    first, last = map(int, text)
    return MachinePorts((first, last), frozenset(_port(local) for _, _, local, _ in _sockets()))


def _ucx_resources(
    pids: Collection[int], connections: Mapping[str, tuple[str, str]]
) -> _UcxResources | None:
    maps = {pid: _text(_PROC / str(pid) / "maps") for pid in pids}
    # A process without UCX may have shared memory and connections for other purposes.
    with_ucx = {pid: text for pid, text in maps.items() if _UCX in text}
    if not with_ucx:
        return None
    files = [name for pid in with_ucx for name in _open_files(pid)]
    sockets = (name.removeprefix("socket:[")[:-1] for name in files if name.startswith("socket:["))
    return _UcxResources(
        any(name.startswith(_VERBS) for name in files),
        frozenset((m[1], m[2]) for text in with_ucx.values() for m in _SEGMENT.finditer(text)),
        frozenset(connections[inode] for inode in sockets if inode in connections),
    )


def _connections() -> Mapping[str, tuple[str, str]]:
    """Inode of a connected socket → (local address, remote address), in the kernel's notation."""
    return {
        inode: (local, remote) for inode, state, local, remote in _sockets() if state in _CONNECTED
    }


def _sockets() -> Iterator[tuple[str, str, str, str]]:
    """Inode, state, local and remote address of each TCP socket, in the kernel's notation."""
    for table in ("tcp", "tcp6"):
        for line in _text(_PROC / "net" / table).splitlines()[1:]:
            # Columns: 1 local address, 2 remote address, 3 state, 9 inode.
            fields = line.split()
            yield fields[9], fields[3], fields[1], fields[2]


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _members() -> Mapping[int, list[int]]:
    """Process group → its processes."""
    members: dict[int, list[int]] = {}
    for pid in sorted(int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()):
        # The command name in parentheses may contain anything; behind it: state, parent, group.
        fields = _text(_PROC / str(pid) / "stat").rpartition(")")[2].split()
        if len(fields) > 2:
            members.setdefault(int(fields[2]), []).append(pid)
    return members


def _words(pid: int, file: str) -> list[str]:
    return [word for word in _text(_PROC / str(pid) / file).split("\0") if word]


def _open_files(pid: int) -> Iterator[str]:
    try:
        for link in (_PROC / str(pid) / "fd").iterdir():
            yield os.readlink(link)
    except OSError:  # the process has ended, or belongs to another user
        return


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # the process has ended, or belongs to another user
        return ""
