"""The timing that a router gets with every generation, whatever the engine reports itself."""

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tandem_contract import endpoints
from tandem_contract.paths import RoutingPath
from tandem_contract.plan import Plan, Target, sign
from tandem_contract.plan_keys import PlanKeys
from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_contract.timing import UNKNOWN, Timing, parse_timing
from tandem_sidecar.handoff.timing import complete_timing, measure_leg, merge_timing
from tandem_sidecar.settings import Policy

from ..conftest import Harness
from ..peers import PARAMS, Turn

USAGE = (
    b'"usage":{"prompt_tokens":16,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":7}}'
)
TEXT = '{"choices":[{"text":"hello"}]}'
TOKENS = {
    PATHS[RequestKind.RESPONSES]: '{"type":"response.output_text.delta","delta":"hello"}',
    PATHS[RequestKind.MESSAGES]: '{"type":"content_block_delta","delta":{"text":"hello"}}',
}
"""Events with a token, where their form is not that of `TEXT`."""
ENGINE = Timing(queue=0.5, compute=1.25, cached=7, computed=9)


async def vllm_prefill(turn: Turn) -> None:
    """A producer that sends no timing of its own."""
    turn.answer(200, b'{"choices":[],' + USAGE + b',"kv_transfer_params":' + PARAMS + b"}")


class FakeVllm:
    """Decodes without a timing of its own; the usage comes at the end of a stream."""

    def __init__(self) -> None:
        self.finish = asyncio.Event()
        """Streams end once it is set."""
        self.last_tokens = 0
        """Events with a token that a stream still sends then."""

    async def __call__(self, turn: Turn) -> None:
        if not turn.request.json.get("stream"):
            turn.answer(200, TEXT[:-1].encode() + b"," + USAGE + b"}")
            return
        turn.stream()
        turn.event(TOKENS.get(turn.request.target, TEXT))
        await self.finish.wait()
        for _ in range(self.last_tokens):
            turn.event(TEXT)
        turn.event('{"choices":[],' + USAGE.decode() + "}")
        turn.event("[DONE]")
        turn.end()


def planned(harness: Harness, keys: PlanKeys, path: RoutingPath) -> dict[str, str]:
    prefill = tuple(Target("p", str(peer.address)) for peer in harness.prefills)
    split = path is RoutingPath.PREFILL_THEN_DECODE
    expires = time.time() + 60
    plan = Plan(path, "r", Target("d", "127.0.0.1:1"), prefill if split else (), 0, "r1", expires)
    return {"x-tandem-plan": sign(plan, keys.current, now=time.time()), "x-request-id": "r1"}


@pytest.fixture
def keys(tmp_path: Path) -> PlanKeys:
    (tmp_path / "k1").write_bytes(b"0123456789abcdef")
    return PlanKeys(tmp_path)


async def ask(
    harness: Harness,
    headers: Mapping[str, str],
    kind: RequestKind = RequestKind.CHAT,
    finish: asyncio.Event | None = None,
) -> str | None:
    """The timing header of one answer, a stream if `finish` is given: set when its head is here."""
    body = json.dumps({"model": "m", "prompt": "Hi", "stream": finish is not None})
    url = harness.url(PATHS[kind])
    async with harness.http.post(url, data=body, headers=headers) as answer:
        if finish is not None:
            finish.set()
        await answer.read()
        return answer.headers.get("x-tandem-timing")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", RequestKind)
@pytest.mark.parametrize(
    "path", [RoutingPath.PREFILL_THEN_DECODE, RoutingPath.FAST_DECODE, RoutingPath.UNIFIED]
)
async def test_every_routed_generation_gets_a_timing(
    harness: Harness, keys: PlanKeys, path: RoutingPath, kind: RequestKind, stream: bool
) -> None:
    engine = FakeVllm()
    await harness.prefill(vllm_prefill)
    await harness.start(engine, keys=keys)
    headers = planned(harness, keys, path)
    value = await ask(harness, headers, kind, engine.finish if stream else None)
    timing = parse_timing(value or "")
    assert timing.leg is not None
    is_split = path is RoutingPath.PREFILL_THEN_DECODE
    is_known = is_split or not stream
    counts = timing.prompt, timing.cached, timing.computed
    assert counts == ((16, 7, 9) if is_known else (None, None, None))
    assert timing.generated == (3 if is_known and not is_split else None)


@pytest.mark.parametrize("path", [RoutingPath.FALLBACK, RoutingPath.UNIFIED])
async def test_a_leg_ends_with_the_first_output_although_its_text_is_held_back(
    harness: Harness, keys: PlanKeys, path: RoutingPath
) -> None:
    """As vLLM does for a stop string or a parser of tools."""
    loop, sent, release = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    asked = 0.0

    async def script(turn: Turn) -> None:
        nonlocal asked
        if turn.request.target == endpoints.MODELS:
            turn.answer(200, b"{}")
            return
        asked = loop.time()
        turn.stream()
        turn.event('{"choices":[{"delta":{"role":"assistant","content":""}}]}')
        sent.set()
        await release.wait()
        turn.event('{"choices":[{"delta":{"content":"hello"}}]}')
        turn.event("[DONE]")
        turn.end()

    await harness.prefill()
    harness.prefills[0].close_port()
    await harness.start(script, keys=keys)
    is_split = path is RoutingPath.FALLBACK
    chosen = planned(harness, keys, RoutingPath.PREFILL_THEN_DECODE if is_split else path)
    start = loop.time()
    answer = asyncio.create_task(ask(harness, chosen, finish=asyncio.Event()))
    await sent.wait()
    # What was sent before a later request was answered has arrived.
    await _list_models(harness)
    arrived = loop.time()
    while loop.time() - arrived <= asked - start:
        await _list_models(harness)
    later = loop.time() - asked
    release.set()
    timing = parse_timing(await answer or "")
    assert timing.leg is not None
    assert timing.leg < later, "it ends before the token, whatever the machine's speed"


async def _list_models(harness: Harness) -> None:
    async with harness.http.get(harness.url(endpoints.MODELS)) as answer:
        await answer.read()


@pytest.mark.parametrize("fails", ["prefill", "decode"])
async def test_an_error_has_the_times_of_a_prefill_that_succeeded(
    harness: Harness, keys: PlanKeys, fails: str
) -> None:
    async def busy(turn: Turn) -> None:
        turn.answer(503, b"{}")

    async def dies(turn: Turn) -> None:
        turn.die()

    await harness.prefill(busy if fails == "prefill" else vllm_prefill)
    await harness.start(dies, keys=keys, policy=Policy(fallback_to_unified=False))
    value = await ask(harness, planned(harness, keys, RoutingPath.PREFILL_THEN_DECODE))
    assert (parse_timing(value or "").leg is None) is (fails == "prefill")


async def test_a_request_without_a_router_gets_none(harness: Harness) -> None:
    await harness.start(FakeVllm())
    assert await ask(harness, {}) is None


async def test_the_engines_own_report_is_completed(harness: Harness) -> None:
    await harness.prefill()
    await harness.start()
    value = await ask(harness, harness.candidates)
    assert value is not None
    assert value.startswith(
        "queue=0.500000;compute=1.250000;cached=7;computed=9;transfer=0.125000;"
    )
    timing = parse_timing(value)
    assert (timing.bytes, timing.prompt) == (4096, 16)
    assert timing.leg is not None
    assert timing.leg < 1.25, "the sidecar's own measurement, not the engine's"


async def test_a_fallback_is_measured_on_the_engine_that_computed(harness: Harness) -> None:
    engine = FakeVllm()
    await harness.prefill()
    harness.prefills[0].close_port()
    await harness.start(engine)
    timing = parse_timing(await ask(harness, harness.candidates, finish=engine.finish) or "")
    assert timing.leg is not None
    assert timing.prompt is None


@pytest.mark.parametrize("last_tokens", [0, 2000])
async def test_the_usage_that_ends_a_stream_is_counted_and_traced(
    harness: Harness, keys: PlanKeys, last_tokens: int
) -> None:
    engine = FakeVllm()
    engine.last_tokens = last_tokens
    await harness.start(engine, keys=keys)
    headers = planned(harness, keys, RoutingPath.FAST_DECODE)
    timing = parse_timing(await ask(harness, headers, finish=engine.finish) or "")
    assert timing.prompt is None
    async with harness.http.get(harness.admin("/requests/r1")) as answer:
        [trace] = await answer.json()
    assert (trace["timing"]["prompt"], trace["timing"]["cached"]) == (16, 7)
    assert await harness.metric('tandem_sidecar_prompt_tokens_total{source="cached"}') == 7
    assert await harness.metric('tandem_sidecar_prompt_tokens_total{source="computed"}') == 9


@pytest.mark.parametrize("status", [400, 500])
async def test_a_failure_has_no_duration(harness: Harness, keys: PlanKeys, status: int) -> None:
    async def script(turn: Turn) -> None:
        turn.answer(status, b'{"error": {}}')

    await harness.prefill(script)
    await harness.start(script, keys=keys)
    for path in (RoutingPath.FAST_DECODE, RoutingPath.PREFILL_THEN_DECODE):
        assert await ask(harness, planned(harness, keys, path)) == "-"


async def test_a_lost_engine_is_nothing_known(harness: Harness, keys: PlanKeys) -> None:
    async def script(turn: Turn) -> None:
        turn.die()

    await harness.start(script, keys=keys)
    headers = planned(harness, keys, RoutingPath.FAST_DECODE)
    assert await ask(harness, headers) == "-"


def test_the_engines_figures_outweigh_the_usage() -> None:
    measured = measure_leg(ENGINE, 2.0, b'{"usage":{"prompt_tokens":99}}')
    assert measured == Timing(queue=0.5, compute=1.25, cached=7, computed=9, leg=2.0, prompt=99)
    assert measure_leg(ENGINE, 2.0, b"{}").prompt == 16
    assert measure_leg(UNKNOWN, None, b"") is UNKNOWN


def test_the_transfer_of_a_hand_off_is_the_decode_engines() -> None:
    prefill = Timing(compute=1.0, leg=2.0, prompt=16)
    assert merge_timing(prefill, Timing(transfer=0.25, compute=9.0)) == Timing(
        compute=1.0, transfer=0.25, leg=2.0, prompt=16
    )
    streamed = merge_timing(prefill, Timing(transfer=0.25), streamed=True)
    assert streamed == Timing(compute=1.0, transfer=0.25, leg=2.0, prompt=16, streamed=1)
    # The decode engine read no KV after all.
    assert merge_timing(prefill, UNKNOWN, streamed=True) is prefill


@pytest.mark.parametrize(
    ("head_start", "waited"),
    [(1.0, 0.25), (2.0, 0.0), (None, None)],
    ids=["after the answer", "before it", "not known"],
)
def test_what_a_streamed_hand_off_waited_for_after_the_prefill(
    head_start: float | None, waited: float | None
) -> None:
    """The decode engine began to compute 1.25 s after its request."""
    decode = Timing(queue=1.0, transfer=0.25)
    merged = merge_timing(Timing(leg=1.0), decode, streamed=True, head_start=head_start)
    assert merged.waited == waited
    # An engine that reports no queue, and a hand-off that was not streamed.
    lacking = Timing(transfer=0.25)
    assert merge_timing(Timing(), lacking, streamed=True, head_start=head_start).waited is None
    assert merge_timing(Timing(), decode, head_start=head_start).waited is None


def test_the_end_of_a_stream_adds_what_its_head_lacked() -> None:
    end = b'data: {"usage":{"prompt_tokens":16}}\n\ndata: [DONE]\n\n'
    assert complete_timing(Timing(leg=1.0), end) == Timing(leg=1.0, prompt=16)
    assert complete_timing(Timing(leg=1.0, cached=7), b"data: [DONE]\n\n").cached == 7


class FakeSlowVllm:
    """Holds its answers to prompts until the test lets them go, in the order of arrival."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[asyncio.Event] = asyncio.Queue()

    async def __call__(self, turn: Turn) -> None:
        go = asyncio.Event()
        self.waiting.put_nowait(go)
        await go.wait()
        if "kv_transfer_params" in turn.request.json:
            await vllm_prefill(turn)
        else:
            turn.answer(200, TEXT.encode())


@pytest.mark.parametrize("is_split", [False, True], ids=["here", "on a prefill pod"])
async def test_what_else_was_in_flight(harness: Harness, keys: PlanKeys, is_split: bool) -> None:
    engine = FakeSlowVllm()
    await harness.prefill(engine)
    await harness.start(FakeVllm() if is_split else engine, keys=keys)
    path = RoutingPath.PREFILL_THEN_DECODE if is_split else RoutingPath.UNIFIED

    async def send() -> tuple[asyncio.Task[str | None], asyncio.Event]:
        task = asyncio.create_task(ask(harness, planned(harness, keys, path)))
        return task, await asyncio.wait_for(engine.waiting.get(), 10)

    async def inflight(sent: tuple[asyncio.Task[str | None], asyncio.Event]) -> int | None:
        sent[1].set()
        return parse_timing(await sent[0] or "").inflight

    alone = await send()
    assert await inflight(alone) == 0
    first, second = await send(), await send()
    assert await inflight(first) == 1, "the one that came later counts"
    third = await send()
    assert await inflight(second) == 2, "so do those before and after it"
    assert await inflight(third) == 1, "the first one had ended"


async def test_prompts_of_another_engine_are_not_in_flight_here(
    harness: Harness, keys: PlanKeys
) -> None:
    """Legs that read KV, and prompts of other engines, take no time of this one's prompts."""
    producer, decode = FakeSlowVllm(), FakeSlowVllm()
    await harness.prefill(producer)
    await harness.start(decode, keys=keys)
    split = asyncio.create_task(
        ask(harness, planned(harness, keys, RoutingPath.PREFILL_THEN_DECODE))
    )
    prefill = await asyncio.wait_for(producer.waiting.get(), 10)
    alone = asyncio.create_task(ask(harness, planned(harness, keys, RoutingPath.UNIFIED)))
    (await asyncio.wait_for(decode.waiting.get(), 10)).set()
    assert parse_timing(await alone or "").inflight == 0, "the prefill pod computes"
    prefill.set()
    reading = await asyncio.wait_for(decode.waiting.get(), 10)
    alone = asyncio.create_task(ask(harness, planned(harness, keys, RoutingPath.UNIFIED)))
    (await asyncio.wait_for(decode.waiting.get(), 10)).set()
    assert parse_timing(await alone or "").inflight == 0, "the other leg reads its KV"
    reading.set()
    assert parse_timing(await split or "").inflight == 0
