"""`tandem doctor`: looks at a running set and prints what is wrong with it, and the fix."""

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

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
from tandem_kube.errors import ApiError, NotConfigured
from tandem_local.errors import NoStack
from tandem_local.state import State, default_run_dir, read_state

from .options import command, run_dir_option

_COLOURS: Final = {
    Severity.OK: "green",
    Severity.UNKNOWN: "dim",
    Severity.WARNING: "yellow",
    Severity.BROKEN: "red",
}
_TOKEN: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


@command("doctor")
@click.option("-n", "--namespace", help="Of a cluster.  [default: the kubeconfig context's]")
@click.option(
    "--kubeconfig",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Kubeconfig file.  [default: $KUBECONFIG or ~/.kube/config; in a pod, its own cluster]",
)
@click.option("--context", help="Context of the kubeconfig.  [default: the current one]")
@run_dir_option
@click.option("--all", "show_all", is_flag=True, help="Show also what is well.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def doctor(
    *,
    namespace: str | None,
    kubeconfig: Path | None,
    context: str | None,
    run_dir: Path | None,
    show_all: bool,
    as_json: bool,
) -> None:
    """Look at what runs and say what is wrong with it, each finding with its fix.

    Engines and sidecars answer; every item that a hand-off compares is equal; side channels can be
    reached; KV moves at the rate that plans assume; none was lost; how GPUs are joined.

    Without -n, --kubeconfig and --context the stack that tandem up or tandem demo runs here, if one
    does; otherwise a namespace of a cluster, through its API server (it takes the right to list
    pods and to get pods/proxy). Run inside the cluster, it also tries the side channels.

    Exit status: 0 nothing is broken, 1 something is, or nothing can be asked, 2 wrong usage.
    """
    wants_cluster = bool(namespace or kubeconfig or context)
    if run_dir and wants_cluster:
        raise click.UsageError("--run-dir is for this machine's stack, the rest for a cluster")
    try:
        state = None if wants_cluster else _stack_here(run_dir)
        looked = _stack(state) if state else _cluster(namespace, kubeconfig, context)
        facts = asyncio.run(looked)
    except NotConfigured as err:
        fail(str(err) if wants_cluster else f"no stack runs in {default_run_dir()}, and {err}")
    except (NoStack, ApiError) as err:
        fail(str(err))
    if not facts.engines:
        fail("no engine's pod runs there: see tandem status")
    findings = diagnose(facts)
    if as_json:
        click.echo(msgspec.json.encode({"findings": findings}))
    else:
        _print(findings, show_all=show_all)
    sys.exit(1 if worst(findings) is Severity.BROKEN else 0)


def _stack_here(run_dir: Path | None) -> State | None:
    """The stack that is meant; None where none was named and none runs. Raises NoStack."""
    try:
        return read_state(run_dir or default_run_dir())
    except NoStack:
        if run_dir is not None:
            raise
        return None


async def _stack(state: State) -> Facts:
    async with local.places(state) as places:
        try:
            found: tuple[Gpu, ...] | None = gpus.gpus()
            unseen = ""
        except gpus.NoGpus as err:
            found, unseen = None, str(err)
        return await _facts(places, found, unseen)


async def _cluster(namespace: str | None, kubeconfig: Path | None, context: str | None) -> Facts:
    # Only here: the client takes two seconds to import.
    from tandem_doctor import cluster  # noqa: PLC0415
    from tandem_kube.client import connect  # noqa: PLC0415

    async with await connect(kubeconfig, context) as api:
        inside = _TOKEN.exists()
        places = await cluster.places(api, namespace or api.namespace, inside=inside)
        return await _facts(places, None, "the engines are on other machines")


async def _facts(places: Sequence[Place], found: tuple[Gpu, ...] | None, unseen: str) -> Facts:
    engines, sidecars = await gather(places)
    return Facts(engines, sidecars, found, unseen)


def _print(findings: Sequence[Finding], *, show_all: bool) -> None:
    console = Console(soft_wrap=True)
    for f in findings:
        if not show_all and f.severity is Severity.OK:
            continue
        mark = Text(f"{f.severity.value:<8}", _COLOURS[f.severity])
        console.print(mark, Text(f"{f.check}: {f.subject}: {f.seen}"))
        if f.fix:
            console.print(Text(f"{'':<9}fix: {f.fix}", "bold"))
    counts = Counter(f.severity for f in findings)
    console.print(", ".join(f"{counts[severity]} {severity.value}" for severity in Severity))
