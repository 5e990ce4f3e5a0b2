"""A cluster's sets for people: pools, pods, routers, and what is not as it should be."""

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.table import Table

from .cluster import PoolView, SetView

_WORDS = {"epp": "EPP", "envoy": "Envoy"}


def tables(sets: Iterable[SetView]) -> Group:
    """One block for each set."""
    blocks: list[RenderableType] = []
    for each in sets:
        blocks += [*_block(each), ""]
    return Group(*blocks[:-1])


def _block(found: SetView) -> Iterator[RenderableType]:
    ready = "ready" if found.ready else "not ready"
    yield f"Set {found.namespace}/{found.name}: {ready}"
    for url in sorted({pool.endpoint for pool in found.pools if pool.endpoint}):
        yield f"Endpoint: {url}"
    if found.routers:
        each = (
            f"{_WORDS.get(r.component, r.component)} of {r.endpoint} {r.available}/{r.desired}"
            for r in found.routers
        )
        yield f"Router: {', '.join(each)} available"
    yield ""
    yield _pools(found)
    yield ""
    yield _pods(found)
    for pool in found.pools:
        for one in pool.conditions:
            yield f"\n{pool.kind} {pool.name}: {one.type}={one.status} {one.reason}: {one.message}"


def _pools(found: SetView) -> Table:
    table = Table("POOL", "KIND", "MODEL", box=None, pad_edge=False)
    for heading in ("DESIRED", "READY", "UP-TO-DATE", "PAIRED", "DRAINING"):
        table.add_column(heading, justify="right")
    table.add_column("REVISION")
    for pool in found.pools:
        counts = (pool.desired, pool.ready_pods, pool.updated, pool.paired, pool.draining)
        table.add_row(pool.name, pool.kind, pool.model or "-", *map(str, counts), _revision(pool))
    return table


def _revision(pool: PoolView) -> str:
    if pool.update_revision and pool.update_revision != pool.revision:
        return f"{pool.revision or 'none'} → {pool.update_revision}"
    return pool.revision or "-"


def _pods(found: SetView) -> Table:
    table = Table("POD", "STATE", "NODE", "TROUBLE", box=None, pad_edge=False)
    for pool in found.pools:
        for pod in pool.pods:
            table.add_row(pod.name, pod.state, pod.node or "-", pod.trouble or "")
    return table
