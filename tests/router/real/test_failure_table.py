"""The failure table of docs/run/router.md, row by row, with real engines: nothing is lost, and no
KV stays held. `test_failures` has the rows in which an engine is killed or a client leaves."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from tandem_contract import metrics
from tandem_contract.paths import ErrorPhase

from ...sidecar.peers import FakePrefill, Turn
from ...sidecar.real.altering_proxy import Change, Params, altering_proxy
from ...sidecar.real.client import Stream, open_response
from ...sidecar.real.engine import Engine
from ...sidecar.real.forwarding import forwarding_pod
from ...sidecar.real.pair import FALLBACK, LONG, SPLIT, call, expected_tokens, until
from .conftest import Routed, Server, routed

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]
SOON: Final = ("--silence-timeout", "3s")
"""More than an engine on a busy machine is silent."""
NO_FALLBACK: Final = {"fallback_to_unified": False}


@asynccontextmanager
async def serving(
    shared: dict[str, Engine],
    tmp_path: Path,
    *flags: str,
    prefills: dict[str, Server] | None = None,
    decodes: dict[str, Server] | None = None,
    settings: dict[str, object] | None = None,
) -> AsyncIterator[Routed]:
    """A router; without `prefills` and `decodes` it has the first real engine of each role."""
    prefills = {"prefill-0": shared["prefill-0"]} if prefills is None else prefills
    decodes = {"decode-0": shared["decode-0"]} if decodes is None else decodes
    backends = {name: (server, "prefill") for name, server in prefills.items()}
    backends |= {name: (server, "decode") for name, server in decodes.items()}
    async with routed(tmp_path / "router.yaml", backends, *flags, serving=settings) as router:
        yield router


@pytest.fixture
async def prefill(shared: dict[str, Engine]) -> Engine:
    await shared["prefill-0"].up()
    return shared["prefill-0"]


@pytest.fixture
async def decode(shared: dict[str, Engine]) -> Engine:
    await shared["decode-0"].up()
    return shared["decode-0"]


@pytest.fixture
async def second_decode(shared: dict[str, Engine]) -> Engine:
    await shared["decode-1"].up()
    return shared["decode-1"]


async def check_answer(router: Routed, seed: int, path: str) -> str:
    """Send a request and check that the answer is right and took `path`; returns the name of the
    prefill backend."""
    request = call(seed)
    result = await router.ask(request)
    assert (result.status, result.path, result.error) == (200, path, "")
    assert result.tokens == expected_tokens(request)
    return result.prefill


async def wait_for_error(router: Routed, phase: ErrorPhase) -> None:
    """Return once a failure of `phase` is counted; those that engines count arrive later."""

    async def is_counted() -> bool:
        return await router.figure(metrics.ERRORS, phase=phase.value) >= 1

    await until(is_counted)


@pytest.mark.parametrize("status", [500, 429, 503, None])
async def test_a_prefill_backend_that_fails_or_is_full_costs_no_answer(
    shared: dict[str, Engine], prefill: Engine, decode: Engine, tmp_path: Path, status: int | None
) -> None:
    async def fails(turn: Turn) -> None:
        if status is None:
            turn.die()
        else:
            turn.answer(status, b'{"error": {"message": "scripted"}}')

    async with FakePrefill(fails) as bad:
        both: dict[str, Server] = {"bad": bad, "prefill-0": prefill}
        async with serving(shared, tmp_path, prefills=both) as router:
            for seed in range(300, 330):
                assert await check_answer(router, seed, SPLIT) == "prefill-0"
                if bad.requests:
                    break
            assert bad.requests
            await router.wait_until_idle(prefill, decode)
        async with serving(shared, tmp_path, prefills={"bad": bad}) as router:
            await check_answer(router, 330, FALLBACK)
            assert await router.figure(metrics.FALLBACKS) == 1
            await router.wait_until_idle(decode)


async def test_a_prefill_backend_that_hangs_is_given_up(
    shared: dict[str, Engine], prefill: Engine, decode: Engine, tmp_path: Path
) -> None:
    async with serving(shared, tmp_path, *SOON) as router:
        prefill.stop()
        await check_answer(router, 331, FALLBACK)
        await wait_for_error(router, ErrorPhase.PREFILL)
        prefill.signal(signal.SIGCONT)
        # The answer that comes late is released: the lease is longer than any test.
        await router.wait_until_idle(prefill, decode)
        assert await prefill.figure(metrics.ENGINE_KV_EXPIRED) == 0


async def test_without_the_fallback_a_prefill_past_its_timeout_is_a_504(
    shared: dict[str, Engine], prefill: Engine, decode: Engine, tmp_path: Path
) -> None:
    settings = NO_FALLBACK | {"prefill_timeout": "500ms"}
    async with serving(shared, tmp_path, settings=settings) as router:
        prefill.stop()
        result = await router.ask(call(332))
        assert (result.status, result.path) == (504, SPLIT)
        assert "no prefill within 0.5s" in result.error
        prefill.signal(signal.SIGCONT)
        await router.wait_until_idle(prefill, decode)


async def test_the_engines_own_refusal_is_passed_on(
    shared: dict[str, Engine], prefill: Engine, decode: Engine, tmp_path: Path
) -> None:
    too_long = call(333, length=4000, tokens=200)
    async with serving(shared, tmp_path) as router:
        result = await router.ask(too_long)
        assert (result.status, result.path) == (400, SPLIT)
        assert "4096" in result.error
        assert await router.figure("tandem_sidecar_legs_total", phase="prefill") == 1
        assert await router.figure(metrics.ERRORS) == 0
        await router.wait_until_idle(prefill, decode)


async def no_params(_: Params) -> Params | None:
    return None


async def another_port(params: Params) -> Params:
    return params | {"remote_port": 1}


@pytest.mark.parametrize(("change", "path"), [(no_params, FALLBACK), (another_port, SPLIT)])
async def test_kv_that_cannot_be_read_is_computed_by_the_decode_backend(
    shared: dict[str, Engine], decode: Engine, tmp_path: Path, change: Change, path: str
) -> None:
    prefill, seed = shared["prefill-1"], 334 if path == FALLBACK else 335
    await prefill.up()
    async with (
        altering_proxy(prefill, change) as proxy,
        serving(shared, tmp_path, prefills={"altered": proxy}) as router,
    ):
        # From here on the engines' counters are compared with their values at this moment.
        assert await router.figure(metrics.ERRORS) == 0
        await check_answer(router, seed, path)
        await wait_for_error(router, ErrorPhase.KV_TRANSFER)
        await router.wait_until_idle(decode)
    # The router cannot tell where its KV is, and its lease is longer than the tests.
    prefill.kill()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_backend_that_hangs_before_the_first_byte_is_replaced(
    shared: dict[str, Engine],
    prefill: Engine,
    decode: Engine,
    second_decode: Engine,
    tmp_path: Path,
    stream: bool,
) -> None:
    both = {"decode-0": decode, "decode-1": second_decode}
    request = call(336 + stream, stream=stream)
    async with serving(shared, tmp_path, *SOON, decodes=dict(both)) as router:
        for engine in both.values():
            engine.stop()
        client = asyncio.create_task(router.ask(request))
        await router.wait_for_phase("decoding")
        listed = (await router.state())["backends"]
        (hung,) = [each["name"] for each in listed if each["name"] in both and each["in_flight"]]
        (other,) = both.keys() - {hung}
        both[other].signal(signal.SIGCONT)
        result = await client
        assert (result.status, result.error, result.path) == (200, "", SPLIT)
        assert result.tokens == expected_tokens(request)
        both[hung].signal(signal.SIGCONT)
        await router.wait_until_idle(prefill, decode, second_decode)
        assert await prefill.figure(metrics.ENGINE_KV_EXPIRED) == 0


async def test_a_decode_answer_that_is_cut_off_is_had_from_another_backend(
    shared: dict[str, Engine],
    prefill: Engine,
    decode: Engine,
    second_decode: Engine,
    tmp_path: Path,
) -> None:
    cut: list[str] = []

    async def cuts(turn: Turn) -> bool:
        cut.append(turn.request.target)
        turn.die()
        return False

    async with forwarding_pod(decode, cuts) as broken:
        both: dict[str, Server] = {"broken": broken, "decode-1": second_decode}
        async with serving(shared, tmp_path, decodes=both) as router:
            for seed in range(340, 370):
                await check_answer(router, seed, SPLIT)
                if cut:
                    break
            assert cut
            await router.wait_until_idle(prefill, decode, second_decode)
            assert await prefill.figure(metrics.ENGINE_KV_EXPIRED) == 0


async def test_a_decode_backend_that_hangs_within_a_stream_ends_it_with_an_error(
    shared: dict[str, Engine], prefill: Engine, decode: Engine, tmp_path: Path
) -> None:
    request = call(338, tokens=LONG, stream=True)
    async with serving(shared, tmp_path, *SOON) as router:
        async with open_response(router.http, router.url, request) as response:
            stream = Stream(response)
            await stream.wait_for_first_bytes()
            decode.stop()
            result = await stream.read_to_end()
        assert result.status == 200
        assert "no sign of life" in result.error
        decode.signal(signal.SIGCONT)
        await router.wait_until_idle(prefill, decode)


@pytest.mark.parametrize("stream", [True, False])
async def test_past_the_drain_timeout_the_client_gets_an_error(
    shared: dict[str, Engine], prefill: Engine, decode: Engine, tmp_path: Path, stream: bool
) -> None:
    request = call(339, tokens=LONG, stream=stream)
    async with serving(shared, tmp_path, "--drain-timeout", "200ms") as router:
        client = asyncio.create_task(router.ask(request))
        await router.wait_for_phase("answering" if stream else "decoding")
        router.process.process.send_signal(signal.SIGTERM)
        result = await client
        assert result.status == (200 if stream else 503)
        assert "shutting down" in result.error
        assert await router.process.exit_status() == 0

        async def are_idle() -> bool:
            return await prefill.idle() and await decode.idle()

        await until(are_idle)
