"""The timing that the sidecar reports of real vLLM, which sends none of its own."""

from statistics import median
from typing import Any

import aiohttp
import pytest

from tandem_contract import headers, metrics
from tandem_contract.timing import Timing, parse_timing
from tandem_planner.prefill_fit import PrefillFit, prefill_sample

from .api_requests import COUNT, KINDS
from .pairs import Moved, Pair

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PROMPTS = [200 + 150 * i for i in range(23)] * 2
"""Tokens of each prompt, up to 3,500."""
PREFILL_SECONDS = "vllm:request_prefill_time_seconds"


def token_ids(length: int, first: int) -> list[int]:
    """A prompt of `length` tokens whose first block no other has."""
    return [3 + (first * 7919 + i * i) % 200 for i in range(length)]


async def timing_of(
    pair: Pair, http: aiohttp.ClientSession, kind: str, body: dict[str, Any]
) -> Timing:
    answer = await pair.handed_off(http, KINDS[kind], body)
    assert answer.status == 200
    return parse_timing(answer.headers[headers.TIMING])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_prefill_leg_of_each_kind_is_reported(
    pair: Pair, http: aiohttp.ClientSession, kind: str, stream: bool
) -> None:
    text = f"timing {kind} {stream}: " + "how deep is the harbour? " * 20
    body = KINDS[kind].body(text, stream=stream)
    computed = await Moved(http, pair.prefill.url("/metrics")).begin()
    first = await timing_of(pair, http, kind, body)
    second = await timing_of(pair, http, kind, body)
    assert first.leg is not None
    assert first.prompt == second.prompt
    assert first.prompt is not None
    assert first.prompt > 100
    assert second.cached is not None
    assert second.cached > 100
    counted = (first.computed or 0) + (second.computed or 0)
    local = await computed.by(metrics.ENGINE_PROMPT_BY_SOURCE, source="local_compute")
    assert counted == local


async def test_an_engine_that_serves_alone_is_reported(
    pair: Pair, http: aiohttp.ClientSession
) -> None:
    # Several answers to one prompt are never split.
    body = KINDS["completions"].body("alone in the harbour " * 20, n=2, temperature=1.0)
    timing = await timing_of(pair, http, "completions", body)
    assert timing.leg is not None
    assert (timing.prompt or 0) > 100
    assert timing.generated == 2 * COUNT
    stream = await timing_of(pair, http, "completions", body | {"stream": True})
    assert stream.leg is not None
    assert stream.prompt is None


async def test_a_fit_of_the_reports_predicts_the_engines_own_prefill_times(
    pair: Pair, http: aiohttp.ClientSession
) -> None:
    """One request at a time without hits: what the sidecar sees contains what vLLM measures."""
    moved = Moved(http, pair.prefill.url("/metrics"))
    fit, truth = PrefillFit(), []
    for i, length in enumerate(PROMPTS):
        await moved.begin()
        body = {"model": "tiny", "prompt": token_ids(length, i), "cache_salt": f"t{i}"}
        timing = await timing_of(pair, http, "completions", body | {"max_tokens": 2})
        seconds = await moved.by(f"{PREFILL_SECONDS}_sum")
        assert await moved.by(f"{PREFILL_SECONDS}_count") == 1
        assert (timing.prompt, timing.cached, timing.computed) == (length, 0, length)
        assert timing.leg is not None
        assert timing.leg >= seconds
        fit.add(prefill_sample([(length, 0)], timing.leg), float(i))
        truth.append((length, seconds, timing.leg))
    error = median(abs(fit.cost.seconds(n) - s) / s for n, s, _ in truth)
    overhead = median(leg - s for _, s, leg in truth)
    print(f"\n{len(truth)} prefills: a fit of the sidecar's legs errs by {error:.1%} (median)")
    print(f"a leg is {overhead * 1e3:.1f} ms longer than vLLM's prefill (median)")
