"""How long answers are, learned from those that ended, and what a delay does to those that run.

A prefill delays each answer of its pod once, which lengthens the answer's mean ITL by the seconds
divided by its tokens: `tandem_planner.cost.stall_share`. Few requests say how long their answers
will be. So the lengths of the latest answers are counted, and an answer counts with the mean share
of those that got as many tokens as it has got so far: at first mostly that of the short ones, of
which none is left later.

`max_tokens` is the length of every answer for some clients, and a limit that no answer reaches for
others: lengths are counted apart for each power of two of it, and for requests without it.
"""

from collections import deque
from typing import Final

from tandem_planner.cost import SHORT_ANSWER, predicted_itl, stall_share
from tandem_planner.objective import ITL_WEIGHT, NO_OBJECTIVE, Objective, pressure

STAGES: Final = 9
"""Stages of an answer: fewer than SHORT_ANSWER tokens, twice as many, and so on. With three stages,
p99 ITL of the simulated Mooncake requests without `max_tokens` is 77 ms, with nine 53 ms
(`benchmarks.routing --regime "unknown max_tokens"`)."""
_MOST_ANSWERS: Final = 1000.0
"""Answers counted of one class; beyond it, old ones are halved again and again."""
_PRIOR_ANSWERS: Final = 5.0
"""Answers of the expected length that are counted before any ended."""
_LEAST: Final = 1e-6
"""Answers: less is an error of rounding."""
_CLASSES: Final = 24
"""Powers of two of `max_tokens` that are told apart: 16 million tokens are more than any limit."""


def _stage(tokens: float) -> int:
    """The stage in which an answer of `tokens` tokens ends."""
    stage, most = 0, SHORT_ANSWER
    while tokens >= most and stage < STAGES - 1:
        stage += 1
        most *= 2.0
    return stage


class LengthClass:
    """The lengths of answers to requests of one class."""

    def __init__(self, expected: float) -> None:
        """`expected`: tokens of an answer before any is counted."""
        stage = _stage(expected)
        self._answers = [_PRIOR_ANSWERS if i == stage else 0.0 for i in range(STAGES)]
        """Answers that ended in each stage."""
        self._sums = [answers * stall_share(expected) for answers in self._answers]
        """Their shares, added up."""
        self._total = _PRIOR_ANSWERS
        self.shares = [0.0] * STAGES
        """The mean share of the answers that reach each stage; if none does, the share of one that
        ends as it begins."""
        self._average()

    def add(self, tokens: float) -> None:
        """An answer ended after `tokens` tokens."""
        stage = _stage(tokens)
        self._answers[stage] += 1.0
        self._sums[stage] += stall_share(tokens)
        self._total += 1.0
        if self._total > _MOST_ANSWERS:
            self._total /= 2.0
            self._answers = [answers / 2.0 for answers in self._answers]
            self._sums = [shares / 2.0 for shares in self._sums]
        self._average()

    def _average(self) -> None:
        answers, shares, tokens = self._total, sum(self._sums), SHORT_ANSWER
        for stage in range(STAGES):
            if answers > _LEAST:
                self.shares[stage] = shares / answers
            else:
                self.shares[stage] = 2.0 / tokens
            answers -= self._answers[stage]
            shares -= self._sums[stage]
            tokens *= 2.0


class LengthClasses:
    """The lengths of answers of one model, or of models that are served together."""

    def __init__(self) -> None:
        self._classes: dict[int, LengthClass] = {}

    def with_limit(self, limit: int, expected: float) -> LengthClass:
        """The class of requests whose answers have at most `limit` tokens; 0: they do not say.
        `expected`: tokens of such an answer before any is counted."""
        key = min(limit.bit_length(), _CLASSES)
        if (lengths := self._classes.get(key)) is None:
            lengths = self._classes[key] = LengthClass(expected)
        return lengths


class RunningAnswer:
    """An answer that prefills on its pod delay, begun or not."""

    __slots__ = (
        "has_begun",
        "is_counted",
        "lengths",
        "objective",
        "share",
        "since",
        "stage",
        "weight",
    )

    def __init__(self, lengths: LengthClass, objective: Objective = NO_OBJECTIVE) -> None:
        self.lengths = lengths
        self.objective = objective
        """Of its model."""
        self.weight = 1.0
        """By `tandem_planner.objective.answer_weight`; changed only while it is not here."""
        self.share = 0.0
        """What it adds to its pod's total."""
        self.stage = 0
        self.since = 0.0
        """By the pod's clock, when it began; of no meaning before."""
        self.has_begun = False
        self.is_counted = False


class RunningAnswers:
    """The answers of one pod, and a clock that counts the tokens which each of them gets."""

    def __init__(self) -> None:
        self.lengths = LengthClasses()
        """Of all pods that serve the same models."""
        self.total = 0.0
        """Their shares, weighed and added up."""
        self._misses = self._misses_over_itl = 0.0
        """The same times the `stall` of their objectives, and that divided by the ITL."""
        self._tokens = self._at = 0.0
        """The clock, and the time for which it holds."""
        self._count = 0
        self._stages = [deque[RunningAnswer]() for _ in range(STAGES - 1)]
        """Answers that have begun, in that order, by their stage but the last. One that
        ended leaves when its turn comes."""

    def advance(self, now: float, seconds_per_token: float) -> bool:
        """Until `now` each answer got a token every `seconds_per_token` seconds; returns whether
        `total` changed."""
        if now <= self._at:
            return False
        self._tokens += (now - self._at) / seconds_per_token
        self._at = now
        before, tokens = self.total, SHORT_ANSWER
        for stage, answers in enumerate(self._stages):
            latest = self._tokens - tokens
            while answers and answers[0].since <= latest:
                if (answer := answers.popleft()).is_counted:
                    self._enter(stage + 1, answer)
            tokens *= 2.0
        return self.total != before

    def add(self, answer: RunningAnswer) -> None:
        """`answer` is here from now on."""
        answer.share, answer.is_counted = 0.0, True
        self._count += 1
        self._count_share(answer)

    def begin(self, answer: RunningAnswer) -> None:
        """Its first token comes. Without effect on one that has begun."""
        if not answer.has_begun:
            answer.has_begun, answer.since = True, self._tokens
            self._stages[0].append(answer)

    def end(self, answer: RunningAnswer) -> None:
        """It is complete, as far as is known: learn its length."""
        if answer.has_begun:
            answer.has_begun = False
            answer.lengths.add(1.0 + self._tokens - answer.since)

    def remove(self, answer: RunningAnswer) -> None:
        """It is no longer here."""
        if answer.is_counted:
            answer.is_counted = False
            self._count -= 1
            self._add(-answer.share, answer.objective)
            if not self._count:
                # Exactly, whatever was added and subtracted.
                self.total = self._misses = self._misses_over_itl = 0.0

    def harm(self, step: float, utilization: float) -> float:
        """Seconds of harm per second of prefill, where a decode step takes `step` seconds while no
        prompt is computed, and the pod computes prompts for the share `utilization` of its time."""
        harm = ITL_WEIGHT * self.total
        if self._misses > 0.0:
            itl = predicted_itl(step, utilization)
            # By the mean of 1 / ITL, since models may differ in their objectives.
            harm += self._misses * pressure(itl * self._misses_over_itl / self._misses)
        return harm

    def _count_share(self, answer: RunningAnswer) -> None:
        share = answer.weight * answer.lengths.shares[answer.stage]
        self._add(share - answer.share, answer.objective)
        answer.share = share

    def _add(self, share: float, objective: Objective) -> None:
        misses = share * objective.stall
        self.total += share
        self._misses += misses
        self._misses_over_itl += misses / objective.itl

    def _enter(self, stage: int, answer: RunningAnswer) -> None:
        answer.stage = stage
        self._count_share(answer)
        if stage < STAGES - 1:
            self._stages[stage].append(answer)
