"""What the sidecar tells the router of a generation with the answer's head: `x-tandem-timing`.

    measure_leg(engine, seconds, answer, inflight=n)    one leg: the engine's report, completed
    merge_timing(prefill, decode)                       both legs of a hand-off
    complete_timing(timing, end)                        with the usage that ends a stream

vLLM reports nothing of its own, so the sidecar adds how long the leg took, what the answer's
`usage` counts, and how many other prompts the engine had from this sidecar meanwhile. The head of a
stream is not delayed: what is not known yet is left out of it. A `usage` that ends the stream goes
to the record of the request (`GET /requests/ID`) and to `tandem_sidecar_prompt_tokens_total`.
"""

from typing import Final

from msgspec.structs import replace

from tandem_contract import headers
from tandem_contract.timing import UNKNOWN, Timing, parse_timing
from tandem_http1.answers import Answer
from tandem_http1.messages import ResponseHead

from ..bodies.usage import TokenCounts, read_token_counts
from ..observability.record import Leg, Result

EVENTS_SEARCHED: Final = 16 * 1024
"""Bytes at the beginning and at the end of a stream that are searched for its usage: a fast engine
sends more at once, and hundreds of events can have none."""
_TIMING: Final = headers.TIMING.encode()


def read_timing(head: ResponseHead) -> Timing:
    """The times and counts that an engine reports of its leg."""
    value = head.value(_TIMING)
    return parse_timing(value.decode("latin-1")) if value else UNKNOWN


def measure_leg(
    engine: Timing,
    seconds: float | None,
    answer: bytes,
    *,
    inflight: int | None = None,
    whole: bool = False,
) -> Timing:
    """The timing of a leg that computed the prompt.

    `engine`: what the engine reports itself. `seconds`: the leg's duration; None if the leg failed,
    because a failure takes no time that says anything of the engine. `answer`: the body, or its
    first bytes. `inflight`: prompts that were under way beside it. `whole`: the leg lasted until
    the last token, so that `generated` tells how much of it is no prefill.
    """
    if seconds is None:
        return engine
    counts = read_token_counts(answer)
    return Timing(
        queue=engine.queue,
        compute=engine.compute,
        cached=counts.cached if engine.cached is None else engine.cached,
        computed=counts.computed if engine.computed is None else engine.computed,
        transfer=engine.transfer,
        bytes=engine.bytes,
        leg=seconds,
        prompt=_prompt(engine, counts),
        generated=counts.generated if whole else None,
        inflight=inflight,
    )


def measure_prefill(leg: Leg, engine: Timing, answer: Answer, inflight: int | None) -> Timing:
    """The timing of a prefill leg, by its record, which has ended, and its complete answer."""
    is_answered = leg.result is Result.ANSWERED and leg.ended is not None
    seconds = leg.ended - leg.started if is_answered and leg.ended is not None else None
    return measure_leg(engine, seconds, answer.body, inflight=inflight)


def complete_timing(timing: Timing, end: bytes) -> Timing:
    """`timing` with the counts that only the `end` of the answer has; for the record."""
    counts = read_token_counts(end)
    return replace(
        timing,
        cached=counts.cached if timing.cached is None else timing.cached,
        computed=counts.computed if timing.computed is None else timing.computed,
        prompt=counts.prompt,
    )


def merge_timing(
    prefill: Timing, decode: Timing, *, streamed: bool = False, head_start: float | None = None
) -> Timing:
    """The timing of both legs: the prompt as the prefill leg's, the transfer as the decode engine
    reports it. `streamed`: whether they were sent at once; `head_start`: by how many seconds the
    decode leg was then sent before the prefill's answer came, None: not known."""
    if decode.transfer is None and decode.bytes is None:
        return prefill
    return Timing(
        queue=prefill.queue,
        compute=prefill.compute,
        cached=prefill.cached,
        computed=prefill.computed,
        transfer=decode.transfer,
        bytes=decode.bytes,
        leg=prefill.leg,
        prompt=prefill.prompt,
        inflight=prefill.inflight,
        streamed=1 if streamed else None,
        waited=_waited(decode, head_start) if streamed else None,
    )


def _waited(decode: Timing, head_start: float | None) -> float | None:
    """Seconds for which a streamed hand-off waited after the prefill's answer. The decode engine's
    clock starts with its leg, and both its figures together last until it begins to compute."""
    if head_start is None or decode.queue is None or decode.transfer is None:
        return None
    return max(0.0, decode.queue + decode.transfer - head_start)


def _prompt(engine: Timing, counts: TokenCounts) -> int | None:
    if counts.prompt is not None or engine.cached is None or engine.computed is None:
        return counts.prompt
    return engine.cached + engine.computed
