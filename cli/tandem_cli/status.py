"""`tandem status`: the pods of the running stack, their load, and the paths requests took."""

import asyncio
import sys
import time
from dataclasses import asdict
from pathlib import Path

import click
import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from tandem_contract.commandline import fail
from tandem_local.errors import NoStack
from tandem_local.observe import Observation, PodLoad, observe
from tandem_local.state import default_run_dir, read_state

from .options import command, run_dir_option


@command("status")
@run_dir_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
@click.option("--watch", is_flag=True, help="Show it anew every second until interrupted.")
def status(run_dir: Path | None, as_json: bool, watch: bool) -> None:
    """Show the running stack: pods, queues, KV use, and requests by routing path."""
    if as_json and watch:
        raise click.UsageError("--json and --watch exclude each other")
    where = run_dir or default_run_dir()
    try:
        if watch:
            _watch(where)
            return
        seen = _observe(where)
    except KeyboardInterrupt:
        return
    except NoStack as err:
        fail(str(err))
    if as_json:
        click.echo(msgspec.json.encode(to_json(seen)))
    else:
        # A pipe has no width of its own: names are not cut for its sake.
        Console(width=None if sys.stdout.isatty() else 160).print(tables(seen))


def _observe(run_dir: Path) -> Observation:
    return asyncio.run(observe(read_state(run_dir)))


def _watch(run_dir: Path) -> None:
    with Live(tables(_observe(run_dir)), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(1)
            live.update(tables(_observe(run_dir)), refresh=True)


def to_json(seen: Observation) -> dict[str, object]:
    """What `--json` prints: endpoint, pods with their load, paths."""
    pods = []
    for load in seen.pods:
        figures = asdict(load)
        figures.pop("pod")
        pods.append({**msgspec.to_builtins(load.pod), **figures})
    return {"endpoint": seen.endpoint, "pods": pods, "paths": seen.paths}


def tables(seen: Observation) -> Group:
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
