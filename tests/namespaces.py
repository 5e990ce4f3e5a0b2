"""Network namespaces whose processes reach a server of this process, and none of each other.

this process ──veth── namespace of each name      its routes: this link, and STORE
"""

import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

_NEW_NETWORK: Final = 0x40000000
"""CLONE_NEWNET of sched.h."""


class NotPermitted(Exception):
    """This process may not make network namespaces; the message says why."""


@dataclass(frozen=True)
class Namespaces:
    """The namespaces of one test."""

    network: str
    """First three numbers of the addresses, in 198.18.0.0/15, which is for tests (RFC 2544)."""
    names: dict[str, str]
    """Name in the test → name of the namespace."""

    @property
    def store(self) -> str:
        """The address of this process that all namespaces reach."""
        return f"{self.network}.254"

    def address(self, name: str) -> str:
        """The address in a namespace, which only this process reaches."""
        return f"{self.network}.{4 * list(self.names).index(name) + 2}"

    def can_connect(self, name: str, host: str, port: int) -> bool:
        """Whether a process in the namespace can connect to `host`."""
        code = f"import socket; socket.create_connection(({host!r}, {port}), 5)"
        command = ("ip", "netns", "exec", self.names[name], "python3", "-c", code)
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    def forget_connections(self, name: str) -> None:
        """Drop all that arrives on the connections that a namespace has now, as a node does whose
        connection tracking lost them. Neither end is told, and new connections work."""
        namespace = self.names[name]
        listed = ("ip", "netns", "exec", namespace, "ss", "-Htn", "state", "established")
        for line in subprocess.check_output(listed, text=True).splitlines():
            port = line.split()[2].rpartition(":")[2]
            drop = ("ipproto", "tcp", "dport", port, "blackhole")
            _ip("-n", namespace, "rule", "add", "pref", "10", *drop)

    def drop_all(self, name: str) -> None:
        """Drop all that arrives in a namespace from now on, as if its node were gone."""
        _ip("-n", self.names[name], "rule", "add", "pref", "10", "blackhole")


def enter(namespace: str) -> None:
    """Move the calling thread, and all that it starts, into a namespace. Raises OSError."""
    with open(f"/run/netns/{namespace}", "rb") as file:
        # os.setns is not in Python 3.11.
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


@contextmanager
def namespaces(names: Sequence[str]) -> Iterator[Namespaces]:
    """Make a namespace for each name. Raises NotPermitted."""
    number = os.getpid() % 512
    own = {name: f"tandem-{os.getpid()}-{name}" for name in names}
    made = Namespaces(f"198.{18 + number // 256}.{number % 256}", own)
    links = [f"td{os.getpid()}n{i}" for i in range(len(names))]
    try:
        for i, (link, name) in enumerate(zip(links, names, strict=True)):
            _connect(made, link, name, f"{made.network}.{4 * i + 1}")
        yield made
    finally:
        for link, namespace in zip(links, own.values(), strict=True):
            subprocess.run(["ip", "link", "del", link], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


def _connect(made: Namespaces, link: str, name: str, gateway: str) -> None:
    namespace = made.names[name]
    inside = ("-n", namespace)
    _ip("netns", "add", namespace)
    _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
    _ip("addr", "add", f"{gateway}/30", "dev", link)
    _ip("addr", "add", f"{made.store}/32", "dev", link)
    _ip("link", "set", link, "up")
    _ip(*inside, "addr", "add", f"{made.address(name)}/30", "dev", "eth0")
    _ip(*inside, "link", "set", "eth0", "up")
    _ip(*inside, "link", "set", "lo", "up")
    # Behind the rules of `forget_connections`.
    _ip(*inside, "rule", "add", "pref", "100", "lookup", "local")
    _ip(*inside, "rule", "del", "pref", "0")
    # No default route: this process might forward packets from one link to the other.
    _ip(*inside, "route", "add", made.store, "via", gateway)


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as err:
        raise NotPermitted(f"ip {' '.join(arguments)}: {err.stderr.strip()}") from err
