"""Hand-offs through a router process between real engines."""

from pathlib import Path

import pytest

from tandem_contract import endpoints, metrics
from tandem_contract.pod_reports import TRANSFER_EXPOSED
from tandem_planner.cost import STREAMED_SHARE

from ...sidecar.real.engine import Engine
from ...sidecar.real.pair import call, expected_tokens
from .conftest import routed

pytestmark = pytest.mark.component


async def test_a_hand_off_answers_as_one_engine_does(
    shared: dict[str, Engine], tmp_path: Path
) -> None:
    prefill, decode = shared["prefill-0"], shared["decode-0"]
    await prefill.up()
    await decode.up()
    backends = {"p": (prefill, "prefill"), "d": (decode, "decode")}
    async with routed(tmp_path / "router.yaml", backends) as router:
        for stream in (False, True):
            request = call(1 + stream, stream=stream)
            result = await router.ask(request)
            assert (result.status, result.path) == (200, "prefill_then_decode")
            assert result.tokens == expected_tokens(request)
            again = await router.ask(request)
            assert (again.path, again.tokens) == ("fast_decode", result.tokens)
        await router.wait_until_idle(prefill, decode)
        assert await router.figure("disaggregated_kv_transfer_duration_seconds_count") == 2
        assert await router.figure("disaggregated_requests_total", routing_path="fast_decode") == 2
        # The second hand-off was streamed, and the cost of the next ones knows it.
        assert await router.figure(metrics.STREAMED_HANDOFFS) == 1
        async with router.http.get(router.process.admin_url(endpoints.DEBUG_PODS)) as answer:
            [transfer] = [
                pod["estimates"]["transfer"] for pod in await answer.json() if pod["name"] == "d"
            ]
        assert STREAMED_SHARE < transfer["figures"][TRANSFER_EXPOSED] < 1.0
