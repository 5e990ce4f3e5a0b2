"""Calibration: tokens per word and per message, from what a server counted."""

from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract.request_kinds import RequestKind
from tandem_loadtest.calls import Call, Message
from tandem_loadtest.workload.calibration import Sample, calibrate, calibrated
from tandem_loadtest.workload.prompts import PromptWriter
from tandem_loadtest.workload.schedule import sessions
from tandem_loadtest.workload.sessions import Segment
from tandem_loadtest.workload.settings import Arrivals, Prompts, Workload

from .tokenizers import byte_level


def writer(prompts: Prompts, seed: int = 1) -> PromptWriter:
    return PromptWriter(prompts, kind=RequestKind.CHAT, seed=seed)


def messages(call: Call) -> list[Message]:
    assert isinstance(call.prompt, tuple)
    return [message for message in call.prompt if isinstance(message, Message)]


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 9)), min_size=2, max_size=9),
    st.integers(1, 4), st.integers(0, 20),
)  # fmt: skip
def test_calibration_finds_the_exact_relation(
    sizes: list[tuple[int, int]], per_word: int, per_message: int
) -> None:
    sizes = [*sizes, (1, 9), (5000, 1)]
    samples = [(w, m, per_word * w + per_message * m) for w, m in sizes]
    assert calibrate(samples) == pytest.approx((per_word, per_message), abs=1e-6)


def test_calibration_averages_over_noise() -> None:
    noise = Random(1)
    samples: list[Sample] = [
        (w, m, round(1.37 * w + 6 * m + noise.gauss(0, 4)))
        for w in range(50, 2000, 50)
        for m in (1, 2, 6)
    ]
    per_word, per_message = calibrate(samples)
    assert per_word == pytest.approx(1.37, abs=0.01)
    assert per_message == pytest.approx(6, abs=1)


@pytest.mark.parametrize(
    "samples",
    [
        [(100, 1, 150)],
        [(100, 1, 150), (100, 1, 150)],
        [(100, 1, 150), (200, 2, 300)],
        # A line through these samples has a constant below 0.
        [(100, 1, 100), (200, 1, 352), (5, 1, 6)],
    ],
)
def test_samples_that_do_not_tell_words_from_messages_give_words_alone(
    samples: list[Sample],
) -> None:
    per_word, per_message = calibrate(samples)
    assert per_message == 0
    assert per_word == pytest.approx(1.5, rel=0.02)


@pytest.mark.parametrize("samples", [[], [(0, 1, 5)], [(5, 1, 0)]])
def test_samples_without_words_or_tokens_cannot_calibrate(samples: list[Sample]) -> None:
    with pytest.raises(ValueError, match="to calibrate prompts"):
        calibrate(samples)


def test_a_calibrated_writer_meets_the_lengths_of_a_server() -> None:
    tokenizer = byte_level(400)

    def usage(call: Call) -> int:
        """A chat template of 7 tokens per message."""
        return sum(7 + len(tokenizer.encode(part.content).ids) for part in messages(call))

    workload, closed = Workload(preset="chat", shared=0.3), Arrivals(process="closed")
    made = list(sessions(workload, closed, seed=1, limit=80))
    source = writer(Prompts(style="words"))
    warm_up = [source.call(session, 0, ()) for session in made[:40]]
    samples = [(*source.size(call), usage(call)) for call in warm_up]
    exact = writer(calibrated(Prompts(style="words"), samples), seed=2)
    errors = []
    for session in made[40:]:
        parts = (*session.system, *session.turns[0].prompt)
        total = sum(part.tokens for part in parts if isinstance(part, Segment))
        errors.append(usage(exact.call(session, 0, ())) / total - 1)
    # The words of this small vocabulary have 1 to 5 tokens.
    assert max(map(abs, errors)) < 0.15
    assert abs(fmean(errors)) < 0.05


def test_with_a_tokenizer_only_what_the_server_adds_is_fitted() -> None:
    exact = Prompts(style="tokenizer", tokenizer="tokenizer.json")
    assert calibrated(exact, [(100, 1, 112), (300, 2, 324)]).tokens_per_message == 12
    # A server that counts fewer tokens than the tokenizer adds nothing.
    assert calibrated(exact, [(100, 1, 90)]).tokens_per_message == 0
    with pytest.raises(ValueError, match="at least one must be answered"):
        calibrated(exact, [])


def test_token_ids_need_no_calibration() -> None:
    assert calibrated(Prompts(style="token-ids"), []) == Prompts(style="token-ids")
