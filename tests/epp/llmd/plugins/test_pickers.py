"""Pickers: order, ties, proportions."""

from collections import Counter
from random import Random

import pytest

from tandem_contract.config import Backend
from tandem_epp.backends.pods import Pod
from tandem_epp.llmd.plugins.pickers import MaxScorePicker, RandomPicker, WeightedRandomPicker
from tandem_epp.llmd.plugins.profile import Picker

A, B, C = (Pod(Backend(name=name, url="http://127.0.0.1:1")) for name in "abc")


def draws(picker: Picker, rated: list[tuple[float, Pod]], times: int = 600) -> Counter[str]:
    random = Random(7)
    return Counter(picker.pick(rated, 1, random)[0].name for _ in range(times))


def test_pods_are_picked_in_order_of_their_scores() -> None:
    assert MaxScorePicker().pick([(1, A), (3, B), (2, C)], 2, Random(1)) == [B, C]


def test_equal_scores_share_the_picks() -> None:
    counts = draws(MaxScorePicker(), [(1, A), (1, B), (0, C)])
    assert counts["c"] == 0
    assert min(counts["a"], counts["b"]) > 200


def test_weighted_draws_follow_the_scores() -> None:
    counts = draws(WeightedRandomPicker(), [(3, A), (1, B), (0, C)])
    assert counts["c"] == 0
    assert 380 < counts["a"] < 520
    assert min(draws(WeightedRandomPicker(), [(0, A), (0, B)]).values()) > 200


def test_random_ignores_scores() -> None:
    assert min(draws(RandomPicker(), [(9, A), (0, B)]).values()) > 200


@pytest.mark.parametrize("picker", [MaxScorePicker(), RandomPicker(), WeightedRandomPicker()])
def test_no_pod_is_picked_twice(picker: Picker) -> None:
    picked = picker.pick([(1, A), (2, B), (0, C)], 9, Random(1))
    assert sorted(pod.name for pod in picked) == ["a", "b", "c"]
