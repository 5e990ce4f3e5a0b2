"""An edit of a pool between the operator's plan and its write of the status."""

from pathlib import Path

import pytest
from aiohttp import web

from ..cluster.control_plane import ControlPlane
from .killing import proxy
from .operating import PREFILL_POOLS, api_of, names, operating, prefill, until

pytestmark = pytest.mark.control_plane


async def test_an_edit_that_only_the_answer_to_the_status_write_shows_is_planned(
    crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    seen: list[int] = []
    async with api_of(crds.kubeconfig) as api, proxy(crds.kubeconfig, tmp_path) as between:

        async def edit(request: web.Request) -> None:
            if request.path.endswith("/status"):
                seen.append((await request.json())["status"]["observedGeneration"])
                if len(seen) == 1:
                    # No watch reports the edit: its event is older than the answer.
                    between.cut_watches()
                    await api.patch(PREFILL_POOLS, "p", {"spec": {"replicas": 3}}, namespace)

        between.before = edit
        flags = f"--kubeconfig={between.kubeconfig}", f"--namespace={namespace}"
        with operating(tmp_path / "operator.log", *flags, "--no-leader-elect") as operator:
            await api.create(PREFILL_POOLS, prefill("p", namespace, replicas=1))

            async def has_three_pods() -> bool:
                return len(await names(api, namespace)) == 3

            await until(has_three_pods, operator)

            async def is_observed() -> bool:
                status = (await api.get(PREFILL_POOLS, "p", namespace))["status"]
                return bool(status["observedGeneration"] == 2 and status["desiredReplicas"] == 3)

            await until(is_observed, operator)
    assert seen[0] == 1
