"""Random records, for tests against plain recomputation."""

from typing import Any

from hypothesis import strategies as st

from tandem_loadtest.records import Outcome, Record

OUTCOMES = st.sampled_from([Outcome.OK, *Outcome, Outcome.OK])
SECONDS = st.floats(0.001, 5).map(lambda seconds: round(seconds, 6))


@st.composite
def records(draw: st.DrawFn) -> list[Record]:
    """Up to 25 records of all outcomes, streamed or not, with and without headers and usage."""
    return [_record(draw, index) for index in range(draw(st.integers(0, 25)))]


def _record(draw: st.DrawFn, index: int) -> Record:
    intended, outcome = index * 0.37, draw(OUTCOMES)
    fields: dict[str, Any] = {"model": draw(st.sampled_from(["", "base", "lora"]))}
    if outcome is not Outcome.OK:
        fields["error"] = f"because of {draw(st.integers(0, 2))}"
    if outcome is Outcome.UNSENT:
        return Record(index, intended, outcome, **fields)
    started = intended + draw(st.sampled_from([0.0, 1e-4, 0.002]))
    sent = started + 1e-4
    end = sent + draw(SECONDS)
    fields |= {"started": started, "sent": sent, "ended": end}
    if draw(st.booleans()):
        gaps = tuple(draw(st.lists(SECONDS, max_size=8)))
        last = end + sum(gaps)
        fields |= {"first_token": end, "last_token": last, "gaps": gaps}
        fields["ended"] = last + draw(st.sampled_from([0.0, 0.01, 6.0]))
    if outcome in (Outcome.OK, Outcome.DIFFERS):
        fields |= {
            "prompt_tokens": draw(st.integers(1, 50)),
            "output_tokens": len(fields.get("gaps", ())) + 1 + draw(st.integers(0, 2)),
            "cached_tokens": draw(st.sampled_from([None, 0, 1])),
            "path": draw(st.sampled_from(["", "unified", "prefill_then_decode"])),
            "prefill_backend": draw(st.sampled_from(["", "p0"])),
            "decode_backend": draw(st.sampled_from(["", "d0", "d1"])),
        }
    return Record(index, intended, outcome, **fields)


def answer(
    index: int = 0,
    *,
    intended: float = 1.0,
    late: float = 0.0,
    ttft: float = 0.5,
    gaps: tuple[float, ...] = (0.1, 0.2),
    outcome: Outcome = Outcome.OK,
    **fields: Any,
) -> Record:
    """A streamed answer, complete unless `outcome` says otherwise."""
    started = intended + late
    last = started + ttft + sum(gaps)
    values = {
        "started": started, "sent": started, "first_token": started + ttft, "last_token": last,
        "ended": last, "gaps": gaps, "prompt_tokens": 10, "output_tokens": len(gaps) + 1,
    }  # fmt: skip
    return Record(index, intended, outcome, **(values | fields))
