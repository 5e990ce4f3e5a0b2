"""Cost of the operator: time, API calls, CPU and memory for 5 sets, then 50, of 20 pods each; with
`--sets 100 --pods 10` for 100 of 10.

Runs against a real control plane. kwok simulates the nodes: the real kube-scheduler places the
pods, and they become ready at once. So the benchmark times the operator and the control plane,
which share this machine's cores. Pods are counted without those of each endpoint's Envoy and EPP.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
from tests.cluster import tools
from tests.cluster.control_plane import ControlPlane

from tandem_contract import labels
from tandem_contract.custom_resources import DECODE_POOL, PLURALS, PREFILL_POOL
from tandem_kube.client import Api, connect
from tandem_kube.resources import DEPLOYMENTS, NODES, PODS, Resource

from . import programs
from .figures import Figure, at_most, progress, report

USER = "tandem-operator-benchmark"
NAMESPACE = "default"
NODE_COUNT = 10
FEW, MANY = 5, 50
PODS_PER_SET = 20
REST = 60.0
"""Seconds for which the operator is measured at rest."""
DEADLINE = 900.0
CRDS = Path(__file__).parents[1] / "crds"
PROGRAMS = (*tools.CONTROL_PLANE, "kube-scheduler", "kwok")
LEASES = "--node-lease-duration-seconds=40"
"""kwok renews node leases; without them the control plane marks the nodes as lost."""
STAGES = Path(__file__).parent / "kwok.yaml"
API_FLAGS = {
    # A new node has a taint until the node-lifecycle-controller removes it, and that controller
    # does not run in this control plane.
    "disable_admission_plugins": "TaintNodesByCondition",
    # kwok's client lists by a watch, to which the API server answers with an error where etcd is
    # older than 3.4.31, as Debian's is. With the gate off, the client falls back to a plain list.
    "feature_gates": "WatchList=false",
}
"""Flags of kube-apiserver without which kwok makes no pod ready."""
PREFILL_POOLS = Resource(labels.API_VERSION, PLURALS[PREFILL_POOL])
DECODE_POOLS = Resource(labels.API_VERSION, PLURALS[DECODE_POOL])


@dataclass(frozen=True)
class Fleet:
    """How many sets there are in the end, and how many pods each has."""

    sets: int
    pods: int

    @property
    def prefills(self) -> int:
        return self.pods * 2 // 5

    @property
    def decodes(self) -> int:
        return self.pods - self.prefills


@dataclass(frozen=True)
class Cost:
    """The cost of bringing up a number of sets."""

    sets: int
    seconds: float
    cpu: float
    """Seconds of the operator's CPU."""
    calls: int


class Operator:
    """The operator process, measured through /proc and the API server's audit log."""

    def __init__(self, process: subprocess.Popen[bytes], audit_log: Path) -> None:
        self._process = process
        self._audit_log = audit_log

    def cpu(self) -> float:
        """CPU seconds used so far."""
        # The program name in parentheses may hold spaces; behind it: 11 user time, 12 system time.
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def megabytes(self) -> float:
        """Resident memory."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def calls(self, *, by_kopf: bool = True) -> Counter[str]:
        """API calls by verb and resource, without watches, Leases and discovery. kopf only lists:
        at the start, and at rest a collection whose watch was silent, one a minute in all."""
        counts: Counter[str] = Counter()
        with self._audit_log.open() as lines:
            for line in lines:
                # Most lines are other clients': decode only the operator's.
                if USER not in line:
                    continue
                event = json.loads(line)
                if not by_kopf and event.get("userAgent", "").startswith("kopf/"):
                    continue
                resource = event.get("objectRef", {}).get("resource", "-")
                # Watches last, Leases are renewed all the time, and kinds that are not installed
                # are looked for every 15 s: none of these shows work on a set.
                if event["verb"] != "watch" and resource not in ("leases", "-"):
                    counts[f"{event['verb']} {resource}"] += 1
        return counts


def missing_programs() -> list[str]:
    """Programs that are neither there nor can be built here, with how to install them."""
    return programs.missing([partial(_find_or_build, name) for name in PROGRAMS])


def _find_or_build(name: str) -> None:
    """Raise MissingTool unless `tools.ensure` will find the program or can build it with Go."""
    try:
        tools.path(name)
    except tools.MissingTool as err:
        # etcd is not built here, but installed as a package.
        if name == "etcd":
            raise tools.MissingTool("etcd is missing: apt-get install etcd-server") from err
        if shutil.which("go") is None:
            raise tools.MissingTool(
                f"{name} is missing: install Go (https://go.dev/dl), which builds it at the"
                " benchmark's start"
            ) from err


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
@click.option("--sets", default=MANY, show_default=True, help="how many sets in the end")
@click.option(
    "--pods", "pod_count", default=PODS_PER_SET, show_default=True, help="pods of each set"
)
def main(file: Path | None, sets: int, pod_count: int) -> None:
    """Measure the operator's time, calls, CPU and memory."""
    try:
        tools.ensure(PROGRAMS, progress)
    except tools.MissingTool as missing:
        raise click.ClickException(str(missing)) from missing
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # The stack ends in reverse order: the control plane outlives all its clients.
        cluster = stack.enter_context(ControlPlane.running(folder, API_FLAGS))
        install(cluster)
        kubeconfig = f"--kubeconfig={cluster.kubeconfig}"
        scheduler = (tools.path("kube-scheduler"), kubeconfig, "--leader-elect=false")
        stack.enter_context(running(folder / "scheduler.log", *scheduler, "--secure-port=0"))
        kwok = (
            tools.path("kwok"),
            kubeconfig,
            "--manage-all-nodes=true",
            f"--config={STAGES}",
            LEASES,
        )
        stack.enter_context(running(folder / "kwok.log", *kwok))
        # A user of its own, by which the audit log tells the operator's calls.
        own = cluster.kubeconfig_for(USER, groups=("system:masters",))
        command = (sys.executable, "-m", "tandem_operator.main", "--all-namespaces")
        flags = (f"--kubeconfig={own}", "--health=127.0.0.1:0", "--metrics=127.0.0.1:0")
        process = stack.enter_context(running(folder / "operator.log", *command, *flags))
        operator = Operator(process, cluster.audit_log)
        fleet = Fleet(sets, pod_count)
        report(asyncio.run(measure(cluster.kubeconfig, operator, fleet)), file)


def install(cluster: ControlPlane) -> None:
    cluster.kubectl("apply", "--server-side", f"--filename={CRDS}")
    wait = "wait", "--for=condition=Established", f"--filename={CRDS}", "--timeout=60s"
    cluster.kubectl(*wait)
    cluster.restart_controllers()


@contextmanager
def running(log: Path, *command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process, which the kernel kills when this one ends in any way."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig=KILL", *map(str, command)], stdout=file, stderr=file
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def measure(kubeconfig: Path, operator: Operator, fleet: Fleet) -> list[Figure]:
    sets = fleet.sets
    async with await connect(kubeconfig) as api:
        for number in range(NODE_COUNT):
            await api.create(NODES, node(f"node-{number}"))
        # Two sizes: the cost of a set must not grow with the number of sets.
        small_fleet = await bring_up(api, operator, range(FEW), fleet)
        large_fleet = await bring_up(api, operator, range(FEW, sets), fleet)
        change = await scale_one(api, operator, fleet)
        progress(f"watching {sets} sets at rest for {REST:.0f} s")
        await quiet(api, operator, range(sets))
        # Once the operator is idle: rollout work would count as work at rest.
        calls, cpu, started = operator.calls(), operator.cpu(), time.monotonic()
        await asyncio.sleep(REST)
        at_rest = (operator.cpu() - cpu) / (time.monotonic() - started)
        asked = operator.calls() - calls
        progress(", ".join(f"{count} {call}" for call, count in sorted(asked.items())) or "no call")
        written = sum(n for call, n in asked.items() if call.split()[0] not in ("get", "list"))
    total = small_fleet.seconds + large_fleet.seconds
    more = f"from {small_fleet.sets} sets to {sets}"
    return [
        at_most(f"create to last Ready, {sets} sets × {fleet.pods} pods", total, "s", 300),
        at_most("API calls to create a set", large_fleet.calls / large_fleet.sets, "calls", 100),
        at_most("API calls to add one pod to a pool", change, "calls", 12),
        at_most(
            f"CPU per set, {more}",
            large_fleet.cpu / large_fleet.sets / (small_fleet.cpu / small_fleet.sets),
            "ratio",
            1.2,
        ),
        at_most(
            f"calls per set, {more}",
            large_fleet.calls / large_fleet.sets / (small_fleet.calls / small_fleet.sets),
            "ratio",
            1.2,
        ),
        at_most(f"CPU at rest, {sets} sets", at_rest, "cores", 0.02),
        at_most("writes at rest but for the Lease", written, "writes", 0),
        at_most(
            "calls a minute at rest but for the Lease and discovery", asked.total(), "calls", 1
        ),
        at_most(f"RSS, {sets} sets", operator.megabytes(), "MB", 200),
    ]


async def bring_up(api: Api, operator: Operator, numbers: range, fleet: Fleet) -> Cost:
    """Create sets and wait until every pool is Ready."""
    progress(f"bringing up {len(numbers)} sets")
    started, cpu, calls = time.monotonic(), operator.cpu(), operator.calls().total()
    for number in numbers:
        await api.create(PREFILL_POOLS, pool(PREFILL_POOL, f"p{number}", MODEL, fleet.prefills))
        reference = {"prefillRef": {"name": f"p{number}"}}
        await api.create(DECODE_POOLS, pool(DECODE_POOL, f"d{number}", reference, fleet.decodes))
    await all_have(api, numbers, "Ready", "True")
    # Before `quiet`, which waits for the last status writes.
    took = time.monotonic() - started
    await quiet(api, operator, numbers)
    # After it: the work of the last status writes counts as well.
    spent = operator.cpu() - cpu
    return Cost(len(numbers), took, spent, operator.calls().total() - calls)


async def scale_one(api: Api, operator: Operator, fleet: Fleet) -> int:
    """API calls for one more pod, up to the last status write."""
    # Without kopf's list of a silent collection, which may happen to fall into these seconds.
    calls = operator.calls(by_kopf=False)
    await api.patch(DECODE_POOLS, "d0", {"spec": {"replicas": fleet.decodes + 1}}, NAMESPACE)
    while not await has_pods(api, fleet.decodes + 1):  # noqa: ASYNC110 - another process makes them
        await asyncio.sleep(0.2)
    await quiet(api, operator, range(1))
    spent = operator.calls(by_kopf=False) - calls
    progress(", ".join(f"{count} {call}" for call, count in sorted(spent.items())))
    return spent.total()


async def has_pods(api: Api, count: int) -> bool:
    return len((await api.list(PODS, NAMESPACE, labels=f"{labels.POOL}=d0")).items) == count


async def all_have(api: Api, numbers: range, condition: str, status: str) -> None:
    """Wait until every pool of these sets has the condition, for its present spec."""
    expected = {f"{kind}{number}" for kind in "pd" for number in numbers}
    async with asyncio.timeout(DEADLINE):
        while True:
            pools = [
                *(await api.list(PREFILL_POOLS, NAMESPACE)).items,
                *(await api.list(DECODE_POOLS, NAMESPACE)).items,
            ]
            having = {p["metadata"]["name"] for p in pools if has(p, condition, status)}
            if expected <= having:
                return
            await asyncio.sleep(0.5)


def has(pool: dict[str, Any], condition: str, status: str) -> bool:
    stored = pool.get("status", {})
    # Conditions of an older generation say nothing about the present spec.
    return stored.get("observedGeneration") == pool["metadata"]["generation"] and any(
        entry["type"] == condition and entry["status"] == status for entry in stored["conditions"]
    )


async def routers_are_available(api: Api) -> bool:
    """Whether every Envoy and EPP is available by its Deployment's status."""
    deployments = (await api.list(DEPLOYMENTS, NAMESPACE, labels=labels.ENDPOINT)).items
    return all(
        deployment.get("status", {}).get("availableReplicas") == deployment["spec"]["replicas"]
        for deployment in deployments
    )


async def quiet(api: Api, operator: Operator, numbers: range) -> None:
    """Wait until the rollouts are complete and the operator has made no call for three seconds."""
    # Ready pods become available only `minReadySeconds` later, and then the statuses change: those
    # of pools, and those of the endpoints' Deployments, which the operator watches as well.
    await all_have(api, numbers, "Reconciling", "False")
    async with asyncio.timeout(DEADLINE):
        while not await routers_are_available(api):  # noqa: ASYNC110 - another process writes them
            await asyncio.sleep(1)
    before = -1
    while (now := operator.calls().total()) != before:
        before = now
        await asyncio.sleep(3)


MODEL: dict[str, Any] = {
    "model": {"name": "tiny", "source": {"tiny": {}}},
    "engine": {"type": "torch"},
}


def pool(kind: str, name: str, spec: dict[str, Any], replicas: int) -> dict[str, Any]:
    return {
        "apiVersion": labels.API_VERSION,
        "kind": kind,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {**spec, "replicas": replicas},
    }


def node(name: str) -> dict[str, Any]:
    size = {"cpu": "1000", "memory": "10Ti", "pods": "1000"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "annotations": {"kwok.x-k8s.io/node": "fake"}},
        "status": {"allocatable": size, "capacity": size},
    }


if __name__ == "__main__":
    main()
