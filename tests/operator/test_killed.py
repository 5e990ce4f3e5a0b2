"""SIGKILL after each single write: the next operator continues to the same final state."""

import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tandem_contract import labels
from tandem_contract.metrics import OPERATOR_RECONCILES
from tandem_kube.client import Api
from tandem_kube.resources import (
    CONTROLLER_REVISIONS,
    DEPLOYMENTS,
    POD_DISRUPTION_BUDGETS,
    SECRETS,
    SERVICES,
    Object,
)

from ..cluster.control_plane import ControlPlane
from .killing import Proxy, proxy
from .operating import (
    DECODE_POOLS,
    PREFILL_POOLS,
    Operator,
    api_of,
    condition,
    decode,
    kubelet,
    operating,
    pods,
    prefill,
    until,
)

pytestmark = pytest.mark.control_plane
MOST = 120
"""Upper limit on the writes of one change."""

State = dict[str, Any]
IsDone = Callable[[Api, str], Awaitable[bool]]


@pytest.mark.timeout(300)
async def test_an_operator_killed_after_any_write_leaves_a_recoverable_state(
    crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with api_of(crds.kubeconfig) as api, proxy(crds.kubeconfig, tmp_path) as between:
        for change in (_create, _grow, _shrink, _delete):
            await change(api, namespace, "calm-")
            await run(between, api, namespace, tmp_path / "calm.log", None)
            await change(api, namespace, "shot-")
            kills = await kill_after_each_write(between, api, namespace, tmp_path / "shot.log")
            assert kills, "the proxy saw no writes"

            async def same() -> bool:
                # What the garbage collector takes is gone a moment later.
                return await state(api, namespace, "calm-") == await state(api, namespace, "shot-")

            try:
                await until(same)
            except AssertionError:
                # Shows the difference.
                calm = await state(api, namespace, "calm-")
                assert calm == await state(api, namespace, "shot-"), change.__name__


@pytest.mark.timeout(600)
@pytest.mark.parametrize("compat_changes", [False, True])
async def test_an_operator_killed_after_any_write_of_a_rollout_completes_it(
    compat_changes: bool, crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async def roll(api: Api, namespace: str, prefix: str) -> None:
        # The data type is part of the KV layout, and the DecodePool inherits it: the set moves
        # together. The number of sequences concerns the DecodePool alone.
        resource, name = (PREFILL_POOLS, "p") if compat_changes else (DECODE_POOLS, "d")
        engine = {"dtype": "float64"} if compat_changes else {"maxNumSeqs": 3}
        await api.patch(resource, f"{prefix}{name}", {"spec": {"engine": engine}}, namespace)

    async with (
        api_of(crds.kubeconfig) as api,
        proxy(crds.kubeconfig, tmp_path) as between,
        kubelet(api, namespace),
    ):
        for prefix in ("calm-", "shot-"):
            await _create(api, namespace, prefix)
        await run(between, api, namespace, tmp_path / "calm.log", None, is_complete)
        before = {pod["metadata"]["uid"] for pod in await pods(api, namespace)}
        await roll(api, namespace, "calm-")
        await run(between, api, namespace, tmp_path / "calm.log", None, is_complete)
        await roll(api, namespace, "shot-")
        kills = await kill_after_each_write(
            between, api, namespace, tmp_path / "shot.log", is_complete
        )
        print(f"killed {kills} times")
        # At least: a revision, and for each pod its successor, its label and its deletion.
        assert kills >= 7
        assert await state(api, namespace, "calm-") == await state(api, namespace, "shot-")
        rolled = {pod["metadata"]["uid"] for pod in await pods(api, namespace)} - before
        assert len(rolled) == (8 if compat_changes else 4)


async def is_complete(api: Api, namespace: str) -> bool:
    """Whether every pool's rollout to its present spec is complete."""
    pools = [
        *(await api.list(PREFILL_POOLS, namespace)).items,
        *(await api.list(DECODE_POOLS, namespace)).items,
    ]
    progress = [(pool["metadata"]["generation"], condition(pool, "Progressing")) for pool in pools]
    return all(
        state.get("observedGeneration") == generation and state["reason"] == "Complete"
        for generation, state in progress
    )


async def any_state(_api: Api, _namespace: str) -> bool:
    return True


async def _create(api: Api, namespace: str, prefix: str) -> None:
    await api.create(PREFILL_POOLS, prefill(f"{prefix}p", namespace, replicas=2))
    spec: dict[str, Any] = {"prefillRef": {"name": f"{prefix}p"}, "replicas": 2}
    await api.create(DECODE_POOLS, decode(f"{prefix}d", namespace, **spec))


async def _grow(api: Api, namespace: str, prefix: str) -> None:
    await api.patch(DECODE_POOLS, f"{prefix}d", {"spec": {"replicas": 4}}, namespace)


async def _shrink(api: Api, namespace: str, prefix: str) -> None:
    await api.patch(DECODE_POOLS, f"{prefix}d", {"spec": {"replicas": 1}}, namespace)


async def _delete(api: Api, namespace: str, prefix: str) -> None:
    await api.delete(DECODE_POOLS, f"{prefix}d", namespace)


async def kill_after_each_write(
    between: Proxy, api: Api, namespace: str, log: Path, is_done: IsDone = any_state
) -> int:
    """Run operators, each killed after one write, until one needs none; how many were killed."""
    for kills in range(MOST):
        if not await run(between, api, namespace, log, 1, is_done):
            return kills
    raise AssertionError(f"{MOST} writes and no end: {log.read_text()}")


async def run(
    between: Proxy,
    api: Api,
    namespace: str,
    log: Path,
    writes: int | None,
    is_done: IsDone = any_state,
) -> bool:
    """Run an operator until it is killed after `writes` writes (True) or comes to rest (False)."""
    flags = f"--kubeconfig={between.kubeconfig}", f"--namespace={namespace}", "--no-leader-elect"
    with operating(log, *flags) as operator:
        between.kill_after(writes, lambda: operator.signal(signal.SIGKILL))
        await wait_until_quiet(operator, between, api, namespace, is_done)
        killed = not operator.running
        operator.signal(signal.SIGKILL)
        await operator.ended()
        return killed


async def wait_until_quiet(
    operator: Operator, between: Proxy, api: Api, namespace: str, is_done: IsDone
) -> None:
    """Wait until the operator has ended, or `is_done` and it has told the state of each pool, and
    reconciled every set and endpoint twice without writing."""
    quiet = number = 0
    while operator.running and quiet < 2:
        number += 1
        writes, passes = between.writes, await reconciled(operator)
        counts = []
        for resource in (PREFILL_POOLS, DECODE_POOLS):
            pools = (await api.list(resource, namespace)).items
            counts.append(len(pools))
            for pool in pools:
                note = {"annotations": {"example.com/note": f"{id(operator)}-{number}"}}
                name = pool["metadata"]["name"]
                await api.patch(resource, name, {"metadata": note}, namespace)

        # Each PrefillPool is a set here, and each DecodePool an endpoint.
        async def passed(before: list[float] = passes, due: list[int] = counts) -> bool:
            now = await reconciled(operator)
            is_passed = all(n >= b + d for n, b, d in zip(now, before, due, strict=True))
            return not operator.running or is_passed

        await until(passed, operator)
        is_quiet = between.writes == writes and await is_told(api, namespace)
        quiet = quiet + 1 if is_quiet and await is_done(api, namespace) else 0


async def is_told(api: Api, namespace: str) -> bool:
    """Whether each pool's status is of its newest specification: a set that waits writes nothing
    either, while others are reconciled."""
    for resource in (PREFILL_POOLS, DECODE_POOLS):
        for pool in (await api.list(resource, namespace)).items:
            told = pool.get("status", {}).get("observedGeneration")
            if (
                told != pool["metadata"]["generation"]
                and "deletionTimestamp" not in pool["metadata"]
            ):
                return False
    return True


async def reconciled(operator: Operator) -> list[float]:
    """How many sets and how many endpoints the operator has reconciled."""
    return await operator.figures(OPERATOR_RECONCILES, 'loop="set"', 'loop="endpoint"')


async def state(api: Api, namespace: str, prefix: str) -> State:
    """All objects of the pools with a prefix, without prefix and revision in their names."""
    objects: State = {}
    for resource in (CONTROLLER_REVISIONS, POD_DISRUPTION_BUDGETS, DEPLOYMENTS, SERVICES, SECRETS):
        listed = (await api.list(resource, namespace)).items
        objects[resource.plural] = sorted(
            _anonymous(body["metadata"]["name"], body, prefix)
            for body in listed
            if body["metadata"]["name"].startswith(prefix)
        )
    objects["pods"] = sorted(
        _anonymous(body["metadata"]["name"], body, prefix)
        for body in await pods(api, namespace)
        if body["metadata"]["name"].startswith(prefix)
    )
    for resource in (PREFILL_POOLS, DECODE_POOLS):
        for pool in (await api.list(resource, namespace)).items:
            if pool["metadata"]["name"].startswith(prefix):
                objects[resource.plural] = _stable_status(pool.get("status", {}))
    return objects


def _anonymous(name: str, body: Object, prefix: str) -> str:
    revision = body["metadata"].get("labels", {}).get(labels.REVISION, "-")
    return name.removeprefix(prefix).replace(revision, "REVISION")


def _stable_status(status: Object) -> Object:
    """A pool's counters and conditions, without times and messages."""
    counters = {name: value for name, value in status.items() if isinstance(value, int)}
    conditions = {
        condition["type"]: (condition["status"], condition["reason"])
        for condition in status["conditions"]
    }
    counters.pop("observedGeneration")
    return {**counters, "conditions": conditions}
