"""The node's network: a namespace, and a veth pair between it and the host.

The host routes pod and service addresses through the pair, so no packet for them leaves the
machine. Pods have no route to outside networks.
"""

import subprocess

NAMESPACE = "tandem-node"
HOST_IP = "172.30.255.1"
NODE_IP = "172.30.255.2"
POD_RANGE = "10.244.0.0/24"
_HOST_INTERFACE = "tandem-node"


def create(service_range: str) -> None:
    """Create namespace, interfaces and routes. Raises CalledProcessError if not permitted."""
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
    """Remove the interface, its routes and the namespace, as far as they exist."""
    for command in (("link", "del", _HOST_INTERFACE), ("netns", "del", NAMESPACE)):
        subprocess.run(["ip", *command], check=False, capture_output=True)
    # The mount of /run/netns on itself, which `ip netns add` makes, stays: it may be another's.


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
