"""Pickers, one class each: who is drawn from the rated candidates."""

from collections.abc import Sequence
from heapq import nlargest
from random import Random

from ..backends.pods import Pod


class MaxScorePicker:
    """The highest score first; ties in random order, so that equals share the load."""

    def pick(self, rated: Sequence[tuple[float, Pod]], count: int, random: Random) -> list[Pod]:
        keyed = [(score, random.random(), i) for i, (score, _) in enumerate(rated)]
        return [rated[i][1] for _, _, i in nlargest(count, keyed)]


class RandomPicker:
    """Any candidate, each as likely as the other; scores only rule out."""

    def pick(self, rated: Sequence[tuple[float, Pod]], count: int, random: Random) -> list[Pod]:
        return [pod for _, pod in random.sample(rated, min(count, len(rated)))]


class WeightedRandomPicker:
    """Drawn without replacement, each as likely as its share of the scores; where no score is
    above 0, each as likely as the other."""

    def pick(self, rated: Sequence[tuple[float, Pod]], count: int, random: Random) -> list[Pod]:
        if all(score <= 0 for score, _ in rated):
            return RandomPicker().pick(rated, count, random)
        # The largest of u^(1/w), u drawn uniformly, is a draw in proportion to the weights w.
        keyed = [
            (random.random() ** (1.0 / score) if score > 0 else 0.0, i)
            for i, (score, _) in enumerate(rated)
        ]
        return [rated[i][1] for _, i in nlargest(count, keyed)]
