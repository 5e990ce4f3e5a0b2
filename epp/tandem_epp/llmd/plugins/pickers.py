"""Pickers, one class each: how backends are drawn from the scored candidates."""

from collections.abc import Sequence
from heapq import nlargest
from random import Random

from ...backends.pods import Pod


class MaxScorePicker:
    """The highest score first. Ties come in random order, so that equal backends share the load."""

    def __init__(self, max_endpoints: int = 1) -> None:
        self.max_endpoints = max_endpoints

    def pick(self, scored: Sequence[tuple[float, Pod]], count: int, random: Random) -> list[Pod]:
        # The index is the last key, so that no Pods are compared: they have no order.
        keyed = [(score, random.random(), i) for i, (score, _) in enumerate(scored)]
        return [scored[i][1] for _, _, i in nlargest(count, keyed)]


class RandomPicker:
    """Every candidate with the same probability. Scores have no influence, except that −∞ rules a
    backend out before."""

    def __init__(self, max_endpoints: int = 1) -> None:
        self.max_endpoints = max_endpoints

    def pick(self, scored: Sequence[tuple[float, Pod]], count: int, random: Random) -> list[Pod]:
        return [pod for _, pod in random.sample(scored, min(count, len(scored)))]


class WeightedRandomPicker:
    """Drawn without replacement, each candidate with a probability in proportion to its score. If
    no score is above 0, all have the same probability."""

    def __init__(self, max_endpoints: int = 1) -> None:
        self.max_endpoints = max_endpoints

    def pick(self, scored: Sequence[tuple[float, Pod]], count: int, random: Random) -> list[Pod]:
        if all(score <= 0 for score, _ in scored):
            return RandomPicker().pick(scored, count, random)
        # The k largest of u^(1/w), with u uniform in [0, 1), are a weighted sample without
        # replacement (Efraimidis and Spirakis, 2006).
        keyed = [
            (random.random() ** (1.0 / score) if score > 0 else 0.0, i)
            for i, (score, _) in enumerate(scored)
        ]
        return [scored[i][1] for _, i in nlargest(count, keyed)]
