"""The stack of this machine for people and for programs: pods, their load, the paths taken."""

from dataclasses import asdict

import msgspec
from rich.console import Group
from rich.table import Table

from tandem_local.stack_metrics import PodLoad, StackMetrics


def to_json(seen: StackMetrics) -> dict[str, object]:
    """What `-o json` prints: endpoint, pods with their load, paths."""
    pods = []
    for load in seen.pods:
        figures = asdict(load)
        figures.pop("pod")
        pods.append({**msgspec.to_builtins(load.pod), **figures})
    return {"endpoint": seen.endpoint, "pods": pods, "paths": seen.paths}


def tables(seen: StackMetrics) -> Group:
    """The same for people."""
    pods = Table("NAME", "ROLE", "MODEL", "READY", box=None, pad_edge=False)
    for heading in ("RESTARTS", "RUNNING", "WAITING", "KV-USE"):
        pods.add_column(heading, justify="right")
    for load in seen.pods:
        pods.add_row(*_row(load))
    paths = Table("ROUTING PATH", box=None, pad_edge=False)
    paths.add_column("REQUESTS", justify="right")
    for path, count in sorted(seen.paths.items()):
        paths.add_row(path, str(count))
    if not seen.paths:
        paths.add_row("none yet", "0")
    return Group(f"Endpoint: {seen.endpoint}", "", pods, "", paths)


def _row(load: PodLoad) -> tuple[str, ...]:
    pod = load.pod
    return (
        pod.name,
        pod.role or "router",
        pod.model or "-",
        "yes" if pod.ready else "no",
        str(pod.restarts),
        "-" if load.running is None else str(load.running),
        "-" if load.waiting is None else str(load.waiting),
        "-" if load.kv_usage is None else f"{load.kv_usage:.0%}",
    )
