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
from .options import command, run_dir_option

_SECONDS: Final = 2.0
"""Between two looks with --watch."""


@dataclass(frozen=True)
class Shown:
    """What there is to see, in both forms."""

    tables: Group
    json: object
    ready: bool


Look = Callable[[], Awaitable[Shown]]


@dataclass(frozen=True)
class Wanted:
    """Which cluster, and what of it."""

    name: str | None
    namespace: str | None
    all_namespaces: bool
    kubeconfig: Path | None
    context: str | None

    @property
    def anything(self) -> bool:
        """Whether the user asked for a cluster in any way."""
        return self != Wanted(None, None, False, None, None)


@command("status")
@click.argument("name", required=False)
@click.option("-n", "--namespace", help="Namespace.  [default: the kubeconfig context's]")
@click.option("-A", "--all-namespaces", is_flag=True, help="Of every namespace.")
@click.option(
    "--kubeconfig",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Kubeconfig file.  [default: $KUBECONFIG or ~/.kube/config; in a pod, its own cluster]",
)
@click.option("--context", help="Context of the kubeconfig.  [default: the current one]")
@run_dir_option
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table")
@click.option("--watch", is_flag=True, help="Show it anew until interrupted.")
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
    """Show what runs: the stack of this machine, or the pools of a cluster.

    Without NAME, -n, -A, --kubeconfig and --context: the stack that tandem up or tandem demo runs
    here, if one does: pods, queues, KV use, and requests by routing path.

    Otherwise the cluster: each set of pools with its pods, its router, and every condition that is
    not as it should be; with NAME, the set or pool of this name.

    Exit status: 0 all is ready, 1 something is not or cannot be read, 2 wrong usage.
    """
    wanted = Wanted(name, namespace, all_namespaces, kubeconfig, context)
    if output == "json" and watch:
        raise click.UsageError("-o json and --watch exclude each other")
    if namespace and all_namespaces:
        raise click.UsageError("-n and -A exclude each other")
    if run_dir and wanted.anything:
        raise click.UsageError("--run-dir is for this machine's stack, the rest for a cluster")
    local = run_dir or default_run_dir()
    here = run_dir is not None or (not wanted.anything and _runs(local))
    source = _stack(local) if here else _cluster(wanted)
    try:
        ready = asyncio.run(_show(source, output, watch=watch))
    except KeyboardInterrupt:
        return
    except NotConfigured as err:
        fail(str(err) if wanted.anything else f"no stack runs in {local}, and {err}")
    except (NoStack, ApiError, cluster.ClusterError) as err:
        fail(str(err))
    sys.exit(0 if ready else 1)


def _runs(run_dir: Path) -> bool:
    try:
        read_state(run_dir)
    except NoStack:
        return False
    return True


async def _show(source: AbstractAsyncContextManager[Look], output: str, *, watch: bool) -> bool:
    """Print what `source` has, or keep it on the screen; whether all is ready."""
    # A pipe has no width of its own: names are not cut for its sake.
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False)
    async with source as look:
        shown = await look()
        if watch:
            with Live(shown.tables, console=console, auto_refresh=False, screen=True) as live:
                while True:
                    await asyncio.sleep(_SECONDS)
                    live.update((await look()).tables, refresh=True)
        if output == "json":
            click.echo(msgspec.json.encode(shown.json))
        else:
            console.print(shown.tables)
        return shown.ready


@asynccontextmanager
async def _stack(run_dir: Path) -> AsyncIterator[Look]:
    async def look() -> Shown:
        seen = await scrape_stack(read_state(run_dir))
        ready = all(load.pod.ready for load in seen.pods)
        return Shown(stack_tables.tables(seen), stack_tables.to_json(seen), ready)

    yield look


@asynccontextmanager
async def _cluster(wanted: Wanted) -> AsyncIterator[Look]:
    # Only here: the client takes two seconds to import.
    from tandem_kube.client import connect  # noqa: PLC0415

    async with await connect(wanted.kubeconfig, wanted.context) as api:
        namespace = None if wanted.all_namespaces else wanted.namespace or api.namespace

        async def look() -> Shown:
            sets = cluster.named(await cluster.read(api, namespace), wanted.name)
            if not sets:
                raise cluster.NothingFound(wanted.name, namespace)
            found = {"sets": [cluster.to_json(each) for each in sets]}
            return Shown(cluster_tables.tables(sets), found, all(each.ready for each in sets))

        yield look
