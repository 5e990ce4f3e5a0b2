"""The stack of this machine as tables and as JSON: pods, their load, requests by routing path."""

from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime

import msgspec
from rich.console import Group
from rich.table import Table

from tandem_local.stack_metrics import PodLoad, StackMetrics


def to_json(stack: StackMetrics) -> dict[str, object]:
    """The `-o json` form: endpoint, pods with their load, paths."""
    pods = []
    for load in stack.pods:
        fields = asdict(load)
        fields.pop("pod")
        pods.append({**msgspec.to_builtins(load.pod), **fields})
    return {
        "endpoint": stack.endpoint,
        "pods": pods,
        "paths": stack.paths,
        "refused": stack.refused,
    }


def tables(stack: StackMetrics) -> Group:
    """The `-o table` form: a table of pods and a table of routing paths."""
    pods = Table("NAME", "ROLE", "MODEL", "READY", box=None, pad_edge=False)
    for heading in ("RESTARTS", "RUNNING", "WAITING", "KV-USE"):
        pods.add_column(heading, justify="right")
    for load in stack.pods:
        pods.add_row(*_row(load))
    paths = Table("ROUTING PATH", box=None, pad_edge=False)
    paths.add_column("REQUESTS", justify="right")
    for path, count in sorted(stack.paths.items()):
        paths.add_row(path, str(count))
    if stack.refused:
        paths.add_row("refused", str(stack.refused))
    if not stack.paths:
        paths.add_row("none yet", "0")
    return Group(f"Endpoint: {stack.endpoint}", "", pods, "", paths, *_since(stack))


def _since(stack: StackMetrics) -> Iterator[str]:
    """From when on all requests are counted: a sidecar that starts again begins at 0."""
    starts = [(p.counts_since, p.pod.name) for p in stack.pods if p.counts_since is not None]
    if starts:
        last, pod = max(starts)
        when = datetime.fromtimestamp(last, UTC).isoformat(" ", "seconds")
        yield f"Sidecars count from their start; the last one, of {pod}, started at {when}."


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
