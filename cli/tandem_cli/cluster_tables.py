"""Tables of a cluster's sets: pools, pods, routers, and the conditions that need attention."""

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.table import Table

from .cluster import PoolView, SetView

_COMPONENTS = {"epp": "EPP", "envoy": "Envoy", "router": "router"}


def tables(sets: Iterable[SetView]) -> Group:
    """One block for each set."""
    blocks: list[RenderableType] = []
    for set_view in sets:
        blocks += [*_block(set_view), ""]
    return Group(*blocks[:-1])


def _block(set_view: SetView) -> Iterator[RenderableType]:
    ready = "ready" if set_view.ready else "not ready"
    yield f"Set {set_view.namespace}/{set_view.name}: {ready}"
    for url in sorted({pool.endpoint for pool in set_view.pools if pool.endpoint}):
        yield f"Endpoint: {url}"
    if set_view.routers:
        routers = (
            f"{_COMPONENTS.get(r.component, r.component)} of {r.endpoint} {r.available}/{r.desired}"
            for r in set_view.routers
        )
        yield f"Router: {', '.join(routers)} available"
    yield ""
    yield _pools(set_view)
    yield ""
    yield _pods(set_view)
    for pool in set_view.pools:
        for c in pool.conditions:
            yield f"\n{pool.kind} {pool.name}: {c.type}={c.status} {c.reason}: {c.message}"


def _pools(set_view: SetView) -> Table:
    table = Table("POOL", "KIND", "MODEL", box=None, pad_edge=False)
    for heading in ("DESIRED", "READY", "UP-TO-DATE", "PAIRED", "DRAINING"):
        table.add_column(heading, justify="right")
    table.add_column("REVISION")
    for pool in set_view.pools:
        counts = (pool.desired, pool.ready_pods, pool.updated, pool.paired, pool.draining)
        table.add_row(pool.name, pool.kind, pool.model or "-", *map(str, counts), _revision(pool))
    return table


def _revision(pool: PoolView) -> str:
    if pool.update_revision and pool.update_revision != pool.revision:
        return f"{pool.revision or 'none'} → {pool.update_revision}"
    return pool.revision or "-"


def _pods(set_view: SetView) -> Table:
    table = Table("POD", "STATE", "NODE", "PROBLEM", box=None, pad_edge=False)
    for pool in set_view.pools:
        for pod in pool.pods:
            table.add_row(pod.name, pod.state, pod.node or "-", pod.trouble or "")
    return table
