"""Hand-offs through a router process between real engines."""

from pathlib import Path

import pytest

from tandem_contract import endpoints, metrics
from tandem_contract.pod_reports import TRANSFER_EXPOSED

from ...sidecar.real.engine import Engine
from ...sidecar.real.pair import call, expected_tokens, until
from .conftest import Routed, routed

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
            result = await router.ask(request, f"r-{stream}")
            assert (result.status, result.path) == (200, "prefill_then_decode")
            assert result.tokens == expected_tokens(request)
            again = await router.ask(request)
            assert (again.path, again.tokens) == ("fast_decode", result.tokens)
        await router.wait_until_idle(prefill, decode)
        assert await router.figure("disaggregated_kv_transfer_duration_seconds_count") == 2
        assert await router.figure("disaggregated_requests_total", routing_path="fast_decode") == 2
        # The second hand-off was streamed, and the cost of the next ones knows it.
        assert await router.figure(metrics.STREAMED_HANDOFFS) == 1
        first, second = [await timing(router, f"r-{stream}") for stream in (False, True)]
        waited = 0.7 * first["transfer"] + min(second["waited"], second["transfer"])
        share = waited / (0.7 * first["transfer"] + second["transfer"])
        async with router.http.get(router.process.admin_url(endpoints.DEBUG_PODS)) as answer:
            [transfer] = [
                pod["estimates"]["transfer"] for pod in await answer.json() if pod["name"] == "d"
            ]
        assert transfer["figures"].get(TRANSFER_EXPOSED, 1.0) == pytest.approx(share, abs=0.01)


async def timing(router: Routed, request_id: str) -> dict[str, float]:
    """What the sidecar's part measured of a request."""
    path = endpoints.REQUESTS + request_id
    async with router.http.get(router.process.admin_url(path)) as answer:
        [record] = await answer.json()
    figures: dict[str, float] = record["timing"]
    return figures


@pytest.mark.parametrize("workers", [1, 2])
async def test_engines_are_warmed_up_and_hold_nothing_afterwards(
    shared: dict[str, Engine], tmp_path: Path, workers: int
) -> None:
    prefill, decode = shared["prefill-0"], shared["decode-0"]
    await prefill.up()
    await decode.up()
    backends = {"p": (prefill, "prefill"), "d": (decode, "decode")}
    flags = ("--warm-up", "--workers", str(workers))
    async with routed(tmp_path / "router.yaml", backends, *flags) as router:

        async def is_warm() -> bool:
            return await router.figure("tandem_epp_warmups_total", result="warm") == workers

        await until(is_warm)
        await router.wait_until_idle(prefill, decode)
        # A client's request is another one.
        assert await router.figure("disaggregated_requests_total") == 0
        request = call(3)
        result = await router.ask(request)
        assert (result.path, result.tokens) == ("prefill_then_decode", expected_tokens(request))
        await router.wait_until_idle(prefill, decode)
