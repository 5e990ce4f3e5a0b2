"""`tandem doctor`: checks a running stack or cluster and prints problems with their fixes."""

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from rich.console import Console
from rich.text import Text

from tandem_contract.commandline import fail
from tandem_doctor import gpus, local_pods, processes, router_pods
from tandem_doctor.checks import run_checks
from tandem_doctor.facts import Facts, Gpu
from tandem_doctor.findings import Finding, Severity, worst
from tandem_doctor.gather import Targets, gather_estimates, gather_facts, gather_sidecar
from tandem_doctor.pod_http import NoAnswer
from tandem_kvstore.location import StoreLocation
from tandem_local.state import State

from .options import command
from .storage_options import storage_options, stores_from
from .target import Target, target_options

_COLOURS: Final = {
    Severity.OK: "green",
    Severity.UNKNOWN: "dim",
    Severity.WARNING: "yellow",
    Severity.BROKEN: "red",
}
_SERVICE_ACCOUNT_TOKEN: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
"""Exists in a pod."""


@command("doctor")
@target_options
@storage_options
@click.option(
    "--router",
    metavar="URL",
    help="Check the backends of the tandem-router whose admin port is at URL, and nothing else.",
)
@click.option("--all", "show_all", is_flag=True, help="Print passed checks, too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(
    *,
    show_all: bool,
    as_json: bool,
    router: str | None,
    **options: Any,
) -> None:
    """Check what runs and print each problem with its fix.

    Checks that engines and sidecars answer, that paired engines agree in everything that a hand-off
    compares, that side channels can be reached, that KV is transferred as fast as plans assume
    and fast enough beside the prefill, that UCX's network devices exist and its ports are free
    and open, that no KV was lost, how GPUs are connected, and what the EPP has learned of the
    pods' speed.

    Without -n, --kubeconfig and --context, checks the stack that tandem up or tandem demo runs on
    this machine. If none runs, or with one of these options, checks a namespace of a cluster
    through its API server; that takes the rights to list pods and to get pods/proxy. In a pod of
    the cluster it connects to pods directly: that takes the right to list pods only, and side
    channels are checked too.

    With --storage or --router-file, also writes, reads and deletes an object in an external store
    for KV; without -n, --kubeconfig, --context and --run-dir, nothing else is checked then.

    With --router, checks the backends of a tandem-router, and what it reports itself.

    Exit status: 0 if nothing is broken, 1 if something is broken or cannot be asked, 2 for wrong
    usage.
    """
    stores = stores_from(options)
    findings = _storage(stores) if stores else ()
    if router is not None and any(options.values()):
        raise click.UsageError("--router names another target than -n, --context or --run-dir")
    if router is not None:
        findings += _router(router)
    elif not stores or any(options.values()):
        findings += _engines(Target(**options))
    if as_json:
        click.echo(msgspec.json.encode({"findings": findings}))
    else:
        _print(findings, show_all=show_all)
    sys.exit(1 if worst(findings) is Severity.BROKEN else 0)


def _storage(stores: Sequence[StoreLocation]) -> tuple[Finding, ...]:
    # Imported here, because the S3 library takes a tenth of a second.
    from tandem_doctor.storage_use import storage_finding  # noqa: PLC0415

    async def probe() -> list[Finding]:
        return await asyncio.gather(*map(storage_finding, stores))

    return tuple(asyncio.run(probe()))


def _engines(target: Target) -> tuple[Finding, ...]:
    with target.exit_on_error():
        state = target.stack()
        facts = asyncio.run(_cluster(target) if state is None else _stack(state))
    # Without engines no check applies, and an empty list would read as success.
    if not facts.engines:
        fail("no pod with an engine is running: tandem status (with the same flags) says why")
    return run_checks(facts)


def _router(url: str) -> tuple[Finding, ...]:
    try:
        facts = asyncio.run(_router_facts(url))
    except NoAnswer as err:
        fail(f"the router at {url} does not answer on its admin port: {err}")
    if not facts.engines:
        fail(f"the router at {url} has no backend: list them in its file")
    return run_checks(facts)


async def _router_facts(url: str) -> Facts:
    async with router_pods.targets_of(url) as (targets, admin):
        router = await gather_sidecar(router_pods.ROUTER, admin)
        facts = await _facts(targets, None, "the engines may be on other machines")
        return replace(facts, sidecars=(router,))


async def _stack(state: State) -> Facts:
    async with local_pods.targets_of(state) as targets:
        try:
            # The stack runs on this machine, so its GPUs are the engines'.
            local_gpus: tuple[Gpu, ...] | None = gpus.read_gpus()
            error = ""
        except gpus.NvmlUnavailable as err:
            local_gpus, error = None, str(err)
        facts = await _facts(targets, local_gpus, error)
        return replace(
            facts,
            network_devices=processes.network_devices(),
            machine_ports=processes.machine_ports(),
        )


async def _cluster(target: Target) -> Facts:
    # Imported here, because the Kubernetes client takes two seconds.
    from tandem_doctor import cluster_pods  # noqa: PLC0415
    from tandem_kube.client import connect  # noqa: PLC0415

    # A kubeconfig or context given in a pod may belong to another cluster.
    inside = (
        _SERVICE_ACCOUNT_TOKEN.exists() and target.kubeconfig is None and target.context is None
    )
    async with await connect(target.kubeconfig, target.context) as api:
        namespace = target.namespace or api.namespace
        async with cluster_pods.targets_of(api, namespace, inside=inside) as targets:
            return await _facts(targets, None, "the engines are on other machines")


async def _facts(targets: Targets, local_gpus: tuple[Gpu, ...] | None, gpus_error: str) -> Facts:
    engines, sidecars = await gather_facts(targets.pods)
    epps = await gather_estimates(targets.epps, targets.behind_envoy)
    return Facts(engines, sidecars, local_gpus, gpus_error, epps)


def _print(findings: Sequence[Finding], *, show_all: bool) -> None:
    console = Console(soft_wrap=True)
    for finding, others in _group_equal(findings):
        if not show_all and finding.severity is Severity.OK:
            continue
        more = f" and {others} more" if others else ""
        severity = Text(f"{finding.severity.value:<8}", _COLOURS[finding.severity])
        text = Text(f"{finding.check}: {finding.subject}{more}: {finding.detail}")
        console.print(severity, text)
        if finding.fix:
            console.print(Text(f"{'':<9}fix: {finding.fix}", "bold"))
    counts = Counter(finding.severity for finding in findings)
    console.print(", ".join(f"{counts[severity]} {severity.value}" for severity in Severity))


def _group_equal(findings: Sequence[Finding]) -> list[tuple[Finding, int]]:
    """Findings that differ in the subject only become one, with the number of the others.

    There is a finding for each pair of engines: a set of many pods would print the same line often.
    """
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for f in findings:
        groups.setdefault((f.severity, f.check, f.detail, f.fix), []).append(f)
    return [(group[0], len(group) - 1) for group in groups.values()]
