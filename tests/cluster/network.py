"""The node's network: a namespace, and a pair of interfaces between it and the host.

The host has routes to pods and services through the pair, so it reaches them and no packet for
them goes anywhere else; pods have none to the world outside.
"""

import subprocess
from pathlib import Path

NAMESPACE = "tandem-node"
HOST_IP = "172.30.255.1"
NODE_IP = "172.30.255.2"
POD_RANGE = "10.244.0.0/24"
_HOST_INTERFACE = "tandem-node"
_NAMESPACES = Path("/run/netns")


def create(service_range: str) -> None:
    """Make it all. Raises CalledProcessError, as where this machine forbids it."""
    _ip("netns", "add", NAMESPACE)
    _ip("link", "add", _HOST_INTERFACE, "type", "veth", "peer", "name", "eth0", "netns", NAMESPACE)
    _ip("addr", "add", f"{HOST_IP}/30", "dev", _HOST_INTERFACE)
    _ip("link", "set", _HOST_INTERFACE, "up")
    _ip("-n", NAMESPACE, "link", "set", "lo", "up")
    _ip("-n", NAMESPACE, "addr", "add", f"{NODE_IP}/30", "dev", "eth0")
    _ip("-n", NAMESPACE, "link", "set", "eth0", "up")
    _ip("-n", NAMESPACE, "route", "add", "default", "via", HOST_IP)
    for addresses in (POD_RANGE, service_range):
        _ip("route", "add", addresses, "via", NODE_IP)


def remove() -> None:
    """Remove what is there of it. The routes go with the interface."""
    for command in (("link", "del", _HOST_INTERFACE), ("netns", "del", NAMESPACE)):
        subprocess.run(["ip", *command], check=False, capture_output=True)
    # The first namespace of a machine makes this a mount of itself, which nothing undoes.
    if _NAMESPACES.is_dir() and not any(_NAMESPACES.iterdir()):
        subprocess.run(["umount", _NAMESPACES], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
