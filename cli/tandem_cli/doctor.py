"""`tandem doctor`: looks at a running set and prints what is wrong with it, and the fix."""

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from rich.console import Console
from rich.text import Text

from tandem_contract.commandline import fail
from tandem_doctor import gpus, local
from tandem_doctor.facts import Facts, Gpu
from tandem_doctor.findings import Finding, Severity, worst
from tandem_doctor.gather import Place, gather
from tandem_doctor.rules import diagnose
from tandem_local.state import State

from .options import command
from .source import Source, source_options

_COLOURS: Final = {
    Severity.OK: "green",
    Severity.UNKNOWN: "dim",
    Severity.WARNING: "yellow",
    Severity.BROKEN: "red",
}
_TOKEN: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


@command("doctor")
@source_options
@click.option("--all", "show_all", is_flag=True, help="Show also what is well.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def doctor(
    *,
    show_all: bool,
    as_json: bool,
    **where: Any,
) -> None:
    """Look at what runs and say what is wrong with it, each finding with its fix.

    Engines and sidecars answer; every item that a hand-off compares is equal; side channels can be
    reached; KV moves at the rate that plans assume; none was lost; how GPUs are joined.

    Without -n, --kubeconfig and --context the stack that tandem up or tandem demo runs here, if one
    does; otherwise a namespace of a cluster, through its API server (it takes the right to list
    pods and to get pods/proxy). In a pod of the cluster it asks pods directly, which takes the
    right to list them only, and tries the side channels too.

    Exit status: 0 nothing is broken, 1 something is, or nothing can be asked, 2 wrong usage.
    """
    source = Source(**where)
    with source.explained():
        state = source.stack()
        facts = asyncio.run(_cluster(source) if state is None else _stack(state))
    if not facts.engines:
        fail("no engine's pod runs there: see tandem status")
    findings = diagnose(facts)
    if as_json:
        click.echo(msgspec.json.encode({"findings": findings}))
    else:
        _print(findings, show_all=show_all)
    sys.exit(1 if worst(findings) is Severity.BROKEN else 0)


async def _stack(state: State) -> Facts:
    async with local.places(state) as places:
        try:
            found: tuple[Gpu, ...] | None = gpus.gpus()
            unseen = ""
        except gpus.NoGpus as err:
            found, unseen = None, str(err)
        return await _facts(places, found, unseen)


async def _cluster(source: Source) -> Facts:
    # Only here: the client takes two seconds to import.
    from tandem_doctor import cluster  # noqa: PLC0415
    from tandem_kube.client import connect  # noqa: PLC0415

    # Another cluster's kubeconfig may well be used in a pod.
    inside = _TOKEN.exists() and source.kubeconfig is None and source.context is None
    async with await connect(source.kubeconfig, source.context) as api:
        namespace = source.namespace or api.namespace
        async with cluster.places(api, namespace, inside=inside) as places:
            return await _facts(places, None, "the engines are on other machines")


async def _facts(places: Sequence[Place], found: tuple[Gpu, ...] | None, unseen: str) -> Facts:
    engines, sidecars = await gather(places)
    return Facts(engines, sidecars, found, unseen)


def _print(findings: Sequence[Finding], *, show_all: bool) -> None:
    console = Console(soft_wrap=True)
    for f, others in _alike(findings):
        if not show_all and f.severity is Severity.OK:
            continue
        more = f" and {others} more" if others else ""
        mark = Text(f"{f.severity.value:<8}", _COLOURS[f.severity])
        console.print(mark, Text(f"{f.check}: {f.subject}{more}: {f.seen}"))
        if f.fix:
            console.print(Text(f"{'':<9}fix: {f.fix}", "bold"))
    counts = Counter(f.severity for f in findings)
    console.print(", ".join(f"{counts[severity]} {severity.value}" for severity in Severity))


def _alike(findings: Sequence[Finding]) -> list[tuple[Finding, int]]:
    """The first of those that say the same, and how many others do: pairs are many."""
    said: dict[tuple[str, ...], list[Finding]] = {}
    for f in findings:
        said.setdefault((f.severity, f.check, f.seen, f.fix), []).append(f)
    return [(same[0], len(same) - 1) for same in said.values()]
