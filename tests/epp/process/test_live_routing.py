"""`routing.split` and `routing.slo` while requests are served: the EPP reloads what the operator
renders."""

import json
from pathlib import Path

import pytest

from tandem_contract import headers as wire
from tandem_contract.endpoints import DEBUG_DECISIONS

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


async def test_objectives_apply_to_the_next_request_without_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path, "BUFFERED") as stack:
        file = tmp_path / "router.yaml"
        config = json.loads(router_yaml(stack.decode, stack.prefill))
        prompts = iter(range(10_000))

        async def has_miss() -> bool:
            """Whether the cost of the latest choice has a term for a missed TTFT."""
            status, _, _ = await post(stack, {"model": "m", "prompt": f"{next(prompts)} {LONG}"})
            assert status == 200
            url = f"http://127.0.0.1:{stack.epp.metrics}{DEBUG_DECISIONS}"
            async with stack.session.get(url, params={"limit": "1"}) as response:
                (decision,) = await response.json()
            return any("miss" in cost["terms"] for cost in decision["costs"])

        assert not await has_miss()
        # No prompt is computed within a millisecond.
        file.write_text(json.dumps({**config, "slo": {"m": {"ttft": "1ms"}}}))
        await until(has_miss)
        file.write_text(json.dumps({**config, "slo": {"other": {"ttft": "1ms"}}}))

        async def has_none() -> bool:
            return not await has_miss()

        await until(has_none)
        assert stack.epp.process.returncode is None
