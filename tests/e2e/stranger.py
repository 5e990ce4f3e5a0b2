"""A pod of another team, and what it can connect to."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.cluster.node import Node

NAMESPACE = "team-b"
Place = tuple[str, int]
"""Address and TCP port."""
LISTENING = """
import json
found = set()
for name in ("/proc/net/tcp", "/proc/net/tcp6"):
    for line in open(name).readlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        address, port = local.split(":")
        if state == "0A" and not address.endswith("0100007F"):
            found.add(int(port, 16))
print(json.dumps(sorted(found)))
"""
"""Prints the TCP ports on which a pod listens for others."""
PROBE = """
import concurrent.futures, json, socket, sys
def is_open(place):
    try:
        socket.create_connection(tuple(place), timeout=3).close()
        return True
    except OSError:
        return False
places = json.loads(sys.argv[1])
with concurrent.futures.ThreadPoolExecutor(64) as threads:
    print(json.dumps([p for p, open_ in zip(places, threads.map(is_open, places)) if open_]))
"""
"""Prints those of the given addresses and ports to which it can connect."""


@contextmanager
def stranger(node: Node, image: str) -> Iterator[None]:
    """Run a pod of `image`, which has Python, in a namespace of its own until the block ends."""
    namespace = f"--namespace={NAMESPACE}"
    node.kubectl("create", "namespace", NAMESPACE)
    try:
        wait = "import time; time.sleep(3600)"
        command = ("run", "stranger", f"--image={image}", "--restart=Never", "--command")
        # What follows the dashes is the pod's command.
        node.kubectl(*command, namespace, "--", "python3", "-c", wait)
        node.kubectl("wait", "--for=condition=Ready", "pod/stranger", "--timeout=60s", namespace)
        yield
    finally:
        node.kubectl("delete", "pod/stranger", "--now", "--ignore-not-found", namespace)
        node.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def listening(node: Node, pods: Sequence[Any]) -> list[Place]:
    """Where pods listen for others; pods are API objects whose first container has Python."""
    return [
        (pod["status"]["podIP"], port)
        for pod in pods
        for port in run_python(
            node, pod["metadata"]["name"], pod["metadata"]["namespace"], LISTENING
        )
    ]


def reachable(node: Node, places: Sequence[Place]) -> list[Place]:
    """Those of `places` to which the stranger can connect."""
    return reachable_from(node, ("stranger", NAMESPACE), places)


def reachable_from(node: Node, pod: tuple[str, str], places: Sequence[Place]) -> list[Place]:
    """Those of `places` to which the pod (name, namespace) can connect."""
    found = run_python(node, *pod, PROBE, json.dumps(places))
    return [(address, port) for address, port in found]


def run_python(node: Node, pod: str, namespace: str, *program: str) -> Any:
    """What a program prints as JSON in the first container of a pod. `program`: its text and its
    arguments."""
    command = ("exec", pod, f"--namespace={namespace}", "--", "python3", "-c", *program)
    return json.loads(node.kubectl(*command))
