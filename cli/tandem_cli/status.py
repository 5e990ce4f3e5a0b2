"""`tandem status`: the stack that runs on this machine, or the pools of a cluster."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import msgspec
from rich.console import Console, Group
from rich.live import Live

from tandem_contract.commandline import fail
from tandem_kube.errors import ApiError, NotConfigured
from tandem_local.errors import NoStack
from tandem_local.stack_metrics import scrape_stack
from tandem_local.state import default_run_dir, read_state

from . import cluster, cluster_tables, stack_tables
from .options import (
    STACK_AND_CLUSTER,
    command,
    context_option,
    kubeconfig_option,
    run_dir_option,
)
from .target import no_target_message

_REFRESH_SECONDS: Final = 2.0
"""Seconds between two refreshes with --watch."""


@dataclass(frozen=True)
class Snapshot:
    """The status at one moment, in both output forms."""

    tables: Group
    json: object
    ready: bool


TakeSnapshot = Callable[[], Awaitable[Snapshot]]


@dataclass(frozen=True)
class ClusterQuery:
    """Which cluster to show, and which of its sets."""

    name: str | None
    namespace: str | None
    all_namespaces: bool
    kubeconfig: Path | None
    context: str | None

    @property
    def is_given(self) -> bool:
        """Whether any option or argument names a cluster or a part of one."""
        return self != ClusterQuery(None, None, False, None, None)


@command("status")
@click.argument("name", required=False)
@click.option("-n", "--namespace", help="Namespace.  [default: the kubeconfig context's]")
@click.option("-A", "--all-namespaces", is_flag=True, help="Show all namespaces.")
@kubeconfig_option
@context_option
@run_dir_option
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    help="Output format.",
)
@click.option("--watch", is_flag=True, help="Refresh every 2 seconds until Ctrl-C.")
def status(
    *,
    name: str | None,
    namespace: str | None,
    all_namespaces: bool,
    kubeconfig: Path | None,
    context: str | None,
    run_dir: Path | None,
    output: str,
    watch: bool,
) -> None:
    """Show the stack of this machine, or the pools of a cluster.

    Without NAME, -n, -A, --kubeconfig and --context, shows the stack that tandem up or tandem demo
    runs on this machine: pods, queues, KV cache use, and requests by routing path.

    With one of them, or if no stack runs, shows the cluster: each set of pools with its pods, its
    router, and every condition that needs attention. NAME selects the set or pool of that name.

    Exit status: 0 if everything is ready, 1 if something is not ready or cannot be read, 2 for
    wrong usage.
    """
    query = ClusterQuery(name, namespace, all_namespaces, kubeconfig, context)
    if output == "json" and watch:
        raise click.UsageError("-o json and --watch exclude each other")
    if namespace and all_namespaces:
        raise click.UsageError("-n and -A exclude each other")
    if run_dir and query.is_given:
        raise click.UsageError(STACK_AND_CLUSTER)
    stack_dir = run_dir or default_run_dir()
    # An explicit directory must be used even if no stack runs there: its error says so.
    is_local = run_dir is not None or (not query.is_given and _has_stack(stack_dir))
    source = _stack(stack_dir) if is_local else _cluster(query)
    try:
        ready = asyncio.run(_show(source, output, watch=watch))
    except KeyboardInterrupt:
        return
    except NotConfigured as err:
        fail(str(err) if query.is_given else no_target_message(stack_dir, err))
    except (NoStack, ApiError, cluster.ClusterError) as err:
        fail(str(err))
    sys.exit(0 if ready else 1)


def _has_stack(run_dir: Path) -> bool:
    try:
        read_state(run_dir)
    except NoStack:
        return False
    return True


async def _show(
    source: AbstractAsyncContextManager[TakeSnapshot], output: str, *, watch: bool
) -> bool:
    """Print a snapshot, or refresh it on the screen until interrupted; whether all is ready."""
    # A pipe has no width; 160 columns keep rich from cutting long names.
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False)
    async with source as take_snapshot:
        snapshot = await take_snapshot()
        if watch:
            # `auto_refresh` would draw from a thread while the next snapshot is taken.
            with Live(snapshot.tables, console=console, auto_refresh=False, screen=True) as live:
                while True:
                    await asyncio.sleep(_REFRESH_SECONDS)
                    live.update((await take_snapshot()).tables, refresh=True)
        if output == "json":
            click.echo(msgspec.json.encode(snapshot.json))
        else:
            console.print(snapshot.tables)
        return snapshot.ready


@asynccontextmanager
async def _stack(run_dir: Path) -> AsyncIterator[TakeSnapshot]:
    async def take_snapshot() -> Snapshot:
        # The state is read anew each time: the stack may have been restarted.
        stack = await scrape_stack(read_state(run_dir))
        ready = all(load.pod.ready for load in stack.pods)
        return Snapshot(stack_tables.tables(stack), stack_tables.to_json(stack), ready)

    yield take_snapshot


@asynccontextmanager
async def _cluster(query: ClusterQuery) -> AsyncIterator[TakeSnapshot]:
    # Imported here, because the Kubernetes client takes two seconds.
    from tandem_kube.client import connect  # noqa: PLC0415

    async with await connect(query.kubeconfig, query.context) as api:
        namespace = None if query.all_namespaces else query.namespace or api.namespace

        async def take_snapshot() -> Snapshot:
            sets = cluster.select(await cluster.read_sets(api, namespace), query.name)
            if not sets:
                raise cluster.NothingFound(query.name, namespace)
            json = {"sets": [cluster.to_json(set_view) for set_view in sets]}
            ready = all(set_view.ready for set_view in sets)
            return Snapshot(cluster_tables.tables(sets), json, ready)

        yield take_snapshot
