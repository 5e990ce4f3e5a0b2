"""`routing.split: off` while requests are served: the EPP reloads what the operator renders."""

import json
from pathlib import Path

import pytest

from tandem_contract import headers as wire

from ..envoy.test_with_envoy import LONG, post, router_yaml, running
from ..real import until

pytestmark = pytest.mark.component
PLUGINS = ("active-request-scorer", "always-disagg-pd-decider")
"""Every request is split that may be. By cost, one that is cheaper on its decode pod is not."""


async def test_switching_splits_off_and_on_needs_no_restart(tmp_path: Path) -> None:
    async with running(tmp_path, "BUFFERED", plugins=PLUGINS) as stack:
        file = tmp_path / "router.yaml"
        config = json.loads(router_yaml(stack.decode, stack.prefill, PLUGINS))
        prompts = iter(range(10_000))

        async def is_split() -> bool:
            for backend in stack.decode:
                backend.received.clear()
            status, _, _ = await post(stack, {"model": "m", "prompt": f"{next(prompts)} {LONG}"})
            assert status == 200
            (request,) = [request for backend in stack.decode for request in backend.received]
            return wire.PREFILLER_HOST_PORT in request.headers

        async def is_unified() -> bool:
            return not await is_split()

        assert await is_split()
        for enabled, condition in ((False, is_unified), (True, is_split)):
            config["disaggregated_serving"]["enabled"] = enabled
            file.write_text(json.dumps(config))
            await until(condition)
        figures = await stack.epp.figures()
        assert figures['tandem_epp_decisions_total{path="unified",reason="split_off"}'] > 0
        assert stack.epp.process.returncode is None
