"""An edit of a pool between the operator's plan and its writes to the pool."""

from pathlib import Path

import pytest
from aiohttp import web

from tandem_kube.resources import SERVICES

from ..cluster.control_plane import ControlPlane
from .killing import proxy
from .operating import (
    DECODE_POOLS,
    PREFILL_POOLS,
    api_of,
    decode,
    names,
    operating,
    prefill,
    until,
)

pytestmark = pytest.mark.control_plane


async def test_an_edit_that_only_the_answer_to_the_status_write_shows_is_planned(
    crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    seen: list[int] = []
    is_armed = False
    async with api_of(crds.kubeconfig) as api, proxy(crds.kubeconfig, tmp_path) as between:

        async def edit(request: web.Request) -> None:
            # From the first write for `p` on: any event, such as that of a pod which the operator
            # creates, would enqueue the set and so plan the edit by chance. A watch that broke
            # would, too. A write for `first` may come before the event of the new `p`.
            is_of_p = "/p/" in request.path or '"p"' in await request.text()
            if is_armed and is_of_p and request.method != "GET":
                between.silence_watches()
            if request.path.endswith("/p/status"):
                seen.append((await request.json())["status"]["observedGeneration"])
                if len(seen) == 1:
                    await api.patch(PREFILL_POOLS, "p", {"spec": {"replicas": 3}}, namespace)

        between.before = edit
        flags = f"--kubeconfig={between.kubeconfig}", f"--namespace={namespace}"
        with operating(tmp_path / "operator.log", *flags, "--no-leader-elect") as operator:
            # Each watch enqueues the namespace once it has its first list. By the time that the
            # operator has reconciled another set, all of them have.
            await api.create(PREFILL_POOLS, prefill("first", namespace, replicas=0))

            async def is_idle() -> bool:
                pool = await api.get(PREFILL_POOLS, "first", namespace)
                return "observedGeneration" in pool.get("status", {})

            await until(is_idle, operator)
            is_armed = True
            await api.create(PREFILL_POOLS, prefill("p", namespace, replicas=1))

            async def has_three_pods() -> bool:
                return len(await names(api, namespace)) == 3

            await until(has_three_pods, operator)

            async def is_observed() -> bool:
                status = (await api.get(PREFILL_POOLS, "p", namespace))["status"]
                return bool(status["observedGeneration"] == 2 and status["desiredReplicas"] == 3)

            await until(is_observed, operator)
    assert seen[0] == 1


async def test_an_edit_between_the_plan_and_the_number_of_replicas_is_planned(
    crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    is_edited = False
    edit = {"spec": {"paused": True, "routing": {"endpoint": "moved"}}}
    async with api_of(crds.kubeconfig) as api, proxy(crds.kubeconfig, tmp_path) as between:

        async def edit_first(request: web.Request) -> None:
            nonlocal is_edited
            if request.path.endswith("/decodepools/d") and not is_edited:
                is_edited = True
                between.cut_watches()
                await api.patch(DECODE_POOLS, "d", edit, namespace)

        between.before = edit_first
        flags = f"--kubeconfig={between.kubeconfig}", f"--namespace={namespace}"
        with operating(tmp_path / "operator.log", *flags, "--no-leader-elect") as operator:
            await api.create(PREFILL_POOLS, prefill("p", namespace, replicas=1))
            spec = {"prefillRef": {"name": "p"}}
            await api.create(DECODE_POOLS, decode("d", namespace, **spec))

            async def is_planned() -> bool:
                pool = await api.get(DECODE_POOLS, "d", namespace)
                services = (await api.list(SERVICES, namespace)).items
                observed = pool.get("status", {}).get("observedGeneration")
                return bool(
                    pool["spec"].get("replicas") == 1
                    and observed == pool["metadata"]["generation"]
                    and "moved" in {service["metadata"]["name"] for service in services}
                )

            await until(is_planned, operator)
