from collections import Counter

import torch

from tandem_engine.sampler import sample
from tandem_engine.step import Draw
from tandem_engine.types import SamplingParams

LOGITS = torch.tensor([[0.0, 3.0, 2.0, 1.0]], dtype=torch.float64)


def draw_counts(
    sampling: SamplingParams, draws: int = 400, logits: torch.Tensor = LOGITS
) -> Counter[int]:
    rows = [Draw(sampling, seed=1, index=i) for i in range(draws)]
    return Counter(s.token for s in sample(logits.expand(draws, -1), rows))


def test_greedy_takes_the_most_probable() -> None:
    assert draw_counts(SamplingParams(temperature=0)) == {1: 400}


def test_frequencies_follow_the_distribution() -> None:
    counts = draw_counts(SamplingParams(), draws=20_000)
    probabilities = LOGITS[0].softmax(-1)
    for token in range(4):
        assert abs(counts[token] / 20_000 - float(probabilities[token])) < 0.02


def test_temperature_flattens() -> None:
    assert draw_counts(SamplingParams(temperature=50.0))[0] > draw_counts(SamplingParams())[0]


def test_top_k_and_top_p_cut_the_tail() -> None:
    assert set(draw_counts(SamplingParams(temperature=9.0, top_k=2))) == {1, 2}
    assert set(draw_counts(SamplingParams(top_k=-1, temperature=9.0))) == {0, 1, 2, 3}
    first = float(LOGITS[0].softmax(-1)[1])
    assert set(draw_counts(SamplingParams(top_p=first - 0.01))) == {1}
    assert set(draw_counts(SamplingParams(top_p=first + 0.01))) == {1, 2}
    assert set(draw_counts(SamplingParams(top_p=0.0))) == {1}


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    sampling = SamplingParams(seed=3)
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    draws = [Draw(sampling, seed=3, index=i) for i in range(6)]
    together = [s.token for s in sample(logits, draws)]
    mixed = [Draw(SamplingParams(temperature=0), 0, 0), *draws[1:]]
    assert [sample(logits[i : i + 1], [draws[i]])[0].token for i in range(6)] == together
    assert [s.token for s in sample(logits, mixed)][1:] == together[1:]


def test_banned_tokens_are_never_chosen_and_logprobs_stay_the_models() -> None:
    draw = Draw(SamplingParams(temperature=0, logprobs=2), 0, 0, frozenset({1}))
    (result,) = sample(LOGITS, [draw])
    assert result.token == 2
    assert result.logprobs is not None
    assert [token for token, _ in result.logprobs.top] == [1, 2]
    assert abs(result.logprobs.chosen - float(LOGITS[0].log_softmax(-1)[2])) < 1e-12


def test_half_precision_logits_are_sampled_in_full() -> None:
    assert set(draw_counts(SamplingParams(temperature=9.0), logits=LOGITS.bfloat16())) == {
        0,
        1,
        2,
        3,
    }


def test_no_logprobs_unless_asked_and_zero_reports_the_chosen_alone() -> None:
    none, zero = (Draw(SamplingParams(temperature=0, logprobs=n), 0, 0) for n in (None, 0))
    first, second = sample(LOGITS.expand(2, -1), [none, zero])
    assert first.logprobs is None
    assert second.logprobs is not None
    assert second.logprobs.top == ()


def test_a_row_without_any_possible_token_harms_no_other() -> None:
    sampling = SamplingParams(seed=1, temperature=1.0)
    all_banned = Draw(sampling, 1, 0, frozenset(range(4)))
    rows = torch.cat([LOGITS, torch.full_like(LOGITS, torch.nan), LOGITS])
    draws = [all_banned, Draw(sampling, 1, 0), Draw(sampling, 1, 0)]
    together = [s.token for s in sample(rows, draws)]
    assert all(0 <= token < 4 for token in together)
    assert together[2] == sample(LOGITS, draws[2:])[0].token
