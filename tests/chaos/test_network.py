"""toxiproxy delays, silences or cuts connections to the prefill pod and of the KV transfer."""

from collections.abc import AsyncIterator

import pytest

from tandem_contract import metrics, ports
from tandem_contract.commandline import HostPort

from ..sidecar.real.altering_proxy import Params, altering_proxy
from ..sidecar.real.engine import Engine
from ..sidecar.real.pair import FALLBACK, SPLIT, call, expected_tokens, start_pair
from .toxiproxy import Toxiproxy, toxiproxy

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


@pytest.fixture
async def network(toxiproxy_program: None) -> AsyncIterator[Toxiproxy]:
    async with toxiproxy() as proxies:
        yield proxies


async def test_a_slow_prefill_pod_is_waited_for_as_long_as_there_is_time(
    network: Toxiproxy, decode: Engine, prefill: Engine
) -> None:
    slow = await network.before("prefill", prefill.address)
    async with start_pair(decode) as pair:
        await network.poison("prefill", "latency", latency=700)
        request = call(10)
        answer = await pair.ask(request, slow)
        assert (answer.status, answer.path, answer.tokens) == (
            200,
            SPLIT.value,
            expected_tokens(request),
        )
        assert await pair.errors() == {}
        await pair.wait_until_idle(decode, prefill)


@pytest.mark.parametrize("fallback", [True, False])
async def test_a_prefill_past_its_timeout_is_aborted_and_holds_no_kv(
    network: Toxiproxy, decode: Engine, prefill: Engine, fallback: bool
) -> None:
    slow = await network.before("prefill", prefill.address)
    flags = () if fallback else ("--no-fallback-to-unified",)
    async with start_pair(decode, "--prefill-timeout", "500ms", *flags) as pair:
        await network.poison("prefill", "latency", latency=1500)
        request = call(11)
        answer = await pair.ask(request, slow, prefill.address)
        if fallback:
            assert (answer.status, answer.path, answer.tokens) == (
                200,
                FALLBACK.value,
                expected_tokens(request),
            )
        else:
            assert (answer.status, answer.path) == (504, SPLIT.value)
        assert await pair.errors() == {"prefill": 1}
        # The prefill response arrives a second late; the sidecar releases its KV.
        await pair.wait_until_idle(decode, prefill)


async def test_a_silent_prefill_pod_is_replaced_by_the_next_candidate(
    network: Toxiproxy, decode: Engine, prefill: Engine, second_prefill: Engine
) -> None:
    silent_prefill = await network.before("prefill", second_prefill.address)
    async with start_pair(decode, "--silence-timeout", "1s") as pair:
        await network.poison("prefill", "timeout", timeout=0)
        request = call(12)
        answer = await pair.ask(request, silent_prefill, prefill.address)
        assert (answer.status, answer.path, answer.tokens) == (
            200,
            SPLIT.value,
            expected_tokens(request),
        )
        assert answer.prefill == str(prefill.address)
        assert await pair.errors() == {"prefill": 1}
        await network.cure("prefill", "timeout")
        await pair.wait_until_idle(decode, prefill, second_prefill)


@pytest.mark.parametrize("toxic", ["limit_data", "reset_peer", "timeout"])
async def test_kv_that_breaks_off_or_stops_on_its_way_is_computed_again(
    network: Toxiproxy, decode: Engine, second_prefill: Engine, toxic: str
) -> None:
    """A prompt's KV is 50 KB here; the engine detects a stalled transfer after 10 s."""
    request = call(13)
    attributes = {"limit_data": {"bytes": 20_000}, "reset_peer": {"timeout": 0}}
    failed = await decode.figure(metrics.ENGINE_XFER_FAILED)
    side_channel = await network.before("kv", HostPort(second_prefill.host, ports.SIDE_CHANNEL))

    async def via_toxiproxy(params: Params) -> Params:
        return params | {"remote_host": side_channel.host, "remote_port": side_channel.port}

    async with altering_proxy(second_prefill, via_toxiproxy) as proxy, start_pair(decode) as pair:
        assert await pair.errors() == {}
        await network.poison("kv", toxic, **attributes.get(toxic, {"timeout": 0}))
        answer = await pair.ask(request, proxy.address)
        assert (answer.status, answer.path, answer.tokens) == (
            200,
            SPLIT.value,
            expected_tokens(request),
        )
        assert await decode.figure(metrics.ENGINE_XFER_FAILED) == failed + 1
        await pair.wait_for_errors(kv_transfer=1)
        await network.cure("kv", toxic)
        await pair.wait_until_idle(decode, second_prefill)
