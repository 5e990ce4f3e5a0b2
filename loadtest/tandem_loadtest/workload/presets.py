"""Named workloads: `PRESETS`, and `SessionBuilder`, which makes their sessions. Pure.

Lengths are tokens. A session follows from the seed and its index alone, so that each process can
make its own sessions without those of the others.
"""

import random
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import log
from types import MappingProxyType
from typing import Final, Protocol, Self

from .sessions import Segment, Session, Turn
from .settings import Workload, WorkloadError
from .text import digest

_LONGEST: Final = 8
"""Bound of a draw, in means: a lognormal distribution has no end, but a context window has."""


class Lengths(Protocol):
    """Token counts of a mean, each at least 1."""

    @property
    def mean(self) -> float:
        """Mean in tokens, before draws are bounded."""

    def draw(self, generator: random.Random) -> int:
        """A length from 1 token up to the distribution's bound."""

    def scaled(self, mean: float) -> Self:
        """The same distribution with another mean."""


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths whose logarithm is normally distributed, rounded and cut to 1 … 8 × mean.

    The median is mean × exp(−spread²/2). With a spread up to 1, the upper bound lowers the mean by
    at most 2 %.
    """

    mean: float
    """Tokens, at least 1."""
    spread: float = 0.0
    """Standard deviation of the natural logarithm; 0: all lengths are equal."""

    def draw(self, generator: random.Random) -> int:
        """A length from 1 to 8 × mean tokens."""
        if not self.spread:
            return max(1, round(self.mean))
        tokens = generator.lognormvariate(log(self.mean) - self.spread**2 / 2, self.spread)
        return max(1, round(min(tokens, _LONGEST * self.mean)))

    def scaled(self, mean: float) -> Self:
        """The same spread with another mean."""
        return replace(self, mean=mean)


@dataclass(frozen=True, slots=True)
class Bimodal:
    """Two uniform ranges of lengths: mostly short ones, and a share of long ones."""

    share: float
    """Share of long ones, 0 to 1."""
    short: tuple[float, float] = (50, 200)
    """Bounds in tokens."""
    long: tuple[float, float] = (2000, 4000)
    """Bounds in tokens."""

    @property
    def mean(self) -> float:
        """Mean in tokens of both ranges together."""
        return (1 - self.share) * sum(self.short) / 2 + self.share * sum(self.long) / 2

    def draw(self, generator: random.Random) -> int:
        """A length within one of the two ranges."""
        bounds = self.long if generator.random() < self.share else self.short
        return max(1, round(generator.uniform(*bounds)))

    def scaled(self, mean: float) -> Self:
        """Both ranges moved by the same factor."""
        factor = mean / self.mean
        short, long = self.short, self.long
        return replace(
            self,
            short=(short[0] * factor, short[1] * factor),
            long=(long[0] * factor, long[1] * factor),
        )


@dataclass(frozen=True, slots=True)
class Preset:
    """What the sessions of a workload are like."""

    help: str
    """One line for users."""
    prompt: Lengths
    """Tokens of a session's first prompt, with all that it shares with others."""
    output: Lengths
    """Tokens of each answer."""
    followup: Lengths
    """Tokens of what the user adds in each later turn; with documents, of the first question too,
    which is part of the first prompt's mean."""
    shared: float = 0.0
    """Share of the first prompt that is a system prompt common to all sessions, 0 to 1."""
    turns: int = 1
    """Requests per session."""
    think: float = 0.0
    """Mean seconds between the end of an answer and the next turn (in closed loop, the next session
    too), exponentially distributed and cut at 10 × the mean."""
    documents: int = 0
    """Documents that the sessions' prompts begin with, after the system prompt; 0: none. Their
    popularity follows Zipf's law: a session has the k-th of them with a weight of 1/k."""


PRESETS: Final[Mapping[str, Preset]] = MappingProxyType(
    {
        "fixed": Preset(
            "Prompts and answers of one length each, nothing shared.",
            prompt=LogNormal(512),
            output=LogNormal(128),
            followup=LogNormal(64),
        ),
        # The Azure LLM inference trace of 2023 (conversations; Patel et al., "Splitwise", ISCA
        # 2024) has means of 1155 and 211 tokens and spreads of 0.99 and 0.86.
        "chat": Preset(
            "Chat requests with their history: prompts of 1150 tokens on average, answers of 210.",
            prompt=LogNormal(1150, 0.9),
            output=LogNormal(210, 0.85),
            followup=LogNormal(60, 0.7),
        ),
        "rag": Preset(
            "Questions about 100 long documents, some of which are asked about far more often.",
            prompt=LogNormal(6000, 0.4),
            output=LogNormal(150, 0.5),
            followup=LogNormal(60, 0.5),
            documents=100,
        ),
        # The same publication's code trace: about 2000 tokens of context, very short answers.
        "code": Preset(
            "Code completion: prompts of 2000 tokens on average, very short answers.",
            prompt=LogNormal(2000, 0.8),
            output=LogNormal(28, 0.8),
            followup=LogNormal(100, 0.7),
        ),
        "batch": Preset(
            "Offline processing: long prompts and long answers, nothing shared.",
            prompt=LogNormal(2000, 0.6),
            output=LogNormal(500, 0.5),
            followup=LogNormal(200, 0.5),
        ),
        "bimodal": Preset(
            "Most prompts have 50 to 200 tokens, a share of them (10 %) has 2000 to 4000.",
            prompt=Bimodal(share=0.1),
            output=LogNormal(128, 0.5),
            followup=LogNormal(60, 0.5),
        ),
        "shared-prefix": Preset(
            "Prompts of one length, of which a share (80 %) is a system prompt common to all.",
            prompt=LogNormal(1024),
            output=LogNormal(64, 0.5),
            followup=LogNormal(60, 0.5),
            shared=0.8,
        ),
        "multi-turn": Preset(
            "Conversations of 5 turns that repeat their history, with think time between them.",
            prompt=LogNormal(400, 0.5),
            output=LogNormal(150, 0.6),
            followup=LogNormal(80, 0.7),
            shared=0.5,
            turns=5,
            think=2.0,
        ),
    }
)
"""Workload presets by name."""


def preset(workload: Workload) -> Preset:
    """The preset of `workload` with its overrides.

    Raises WorkloadError when there is none of this name, or an override does not fit it.
    """
    base = PRESETS.get(workload.preset)
    if base is None:
        raise WorkloadError(
            f"workload {workload.preset!r}: write one of {', '.join(PRESETS)}, trace, sharegpt"
        )
    prompt, output, followup = base.prompt, base.output, base.followup
    if workload.long is not None:
        if not isinstance(prompt, Bimodal):
            raise WorkloadError(f"only bimodal has a share of long prompts, not {workload.preset}")
        prompt = replace(prompt, share=workload.long)
    if workload.prompt_tokens is not None:
        prompt = prompt.scaled(workload.prompt_tokens)
    if workload.output_tokens is not None:
        output = output.scaled(workload.output_tokens)
    if base.documents and prompt.mean < 4 * followup.mean:
        # At least three quarters are the document.
        followup = followup.scaled(max(1.0, prompt.mean / 4))
    return replace(
        base,
        prompt=prompt,
        output=output,
        followup=followup,
        shared=base.shared if workload.shared is None else workload.shared,
        turns=workload.turns or base.turns,
        think=base.think if workload.think is None else workload.think,
    )


class ModelMix:
    """Model names in proportion to their weights."""

    def __init__(self, models: Mapping[str, float], seed: int) -> None:
        """Without `models`, every session has the target's model.

        Raises WorkloadError when a weight is not above 0.
        """
        for name, weight in models.items():
            if not weight > 0:
                raise WorkloadError(f"model {name!r}: its weight must be above 0, not {weight}")
        self._names = tuple(models)
        self._weights = tuple(accumulate(models.values()))
        self._seed = seed

    def model(self, index: int) -> str | None:
        """The model of the session at `index`; it depends on nothing else."""
        if not self._names:
            return None
        draw = int.from_bytes(digest(self._seed, f"model/{index}")[:7], "big") / (1 << 56)
        return self._names[bisect_left(self._weights, draw * self._weights[-1])]


class SessionBuilder:
    """Makes the sessions of a preset."""

    def __init__(self, workload: Workload, seed: int) -> None:
        """Raises WorkloadError as `preset` and `ModelMix` do."""
        self._preset = preset(workload)
        self._mix = ModelMix(workload.models, seed)
        self._random = random.Random()
        self._seed = int.from_bytes(digest(seed, "sessions")[:8], "big") << 64
        self._popularity = tuple(accumulate(1 / k for k in range(1, self._preset.documents + 1)))
        self._documents = self._document_lengths() if self._preset.documents else []

    def session(self, index: int, start: float | None) -> Session:
        """The session at `index`, which starts at `start` seconds (None: in closed loop)."""
        generator = self._random
        # An integer seeds faster than a string; the shift keeps seed and index apart.
        generator.seed(self._seed | index)
        system, first = self._first_prompt(index, generator)
        model = self._mix.model(index)
        output = self._preset.output
        turns = [Turn(first, output.draw(generator), model=model)]
        for turn in range(1, self._preset.turns):
            added = Segment(f"user/{index}/{turn}", self._preset.followup.draw(generator))
            think = think_time(generator, self._preset.think)
            turns.append(Turn((added,), output.draw(generator), think, model))
        if start is None:
            # Drawn last: what a session says is the same in open loop.
            turns[0] = replace(turns[0], think=think_time(generator, self._preset.think))
        return Session(index, tuple(turns), system, start)

    def _document_lengths(self) -> list[int]:
        """Tokens of each document, of which sessions see the mean that is left by the question."""
        shape = self._preset
        mean = max(1.0, shape.prompt.mean - shape.followup.mean)
        generator = random.Random(self._seed)
        lengths = [shape.prompt.scaled(mean).draw(generator) for _ in range(shape.documents)]
        # A few documents get most of the questions: theirs decide the mean of the prompts.
        weighted = sum(tokens / k for k, tokens in enumerate(lengths, 1)) / self._popularity[-1]
        return [max(1, round(tokens * mean / weighted)) for tokens in lengths]

    def _first_prompt(
        self, index: int, generator: random.Random
    ) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
        """The system prompt and the first message of the user, who says at least a token."""
        shape, user = self._preset, f"user/{index}/0"
        if self._documents:
            draw = generator.random() * self._popularity[-1]
            rank = bisect_left(self._popularity, draw)
            total = self._documents[rank]
            question = Segment(user, shape.followup.draw(generator))
            # The document's own length decides: its prefix is the same in every session.
            shared = round(shape.shared * total)
            document = (Segment(f"document/{rank}", total - shared),) if total > shared else ()
            return _system(shared), (*document, question)
        total = shape.prompt.draw(generator)
        shared = min(total - 1, round(shape.shared * total))
        return _system(shared), (Segment(user, total - shared),)


def think_time(generator: random.Random, mean: float) -> float:
    """Seconds, exponentially distributed with this mean and at most 10 times as long."""
    return min(generator.expovariate(1 / mean), 10 * mean) if mean else 0.0


def _system(tokens: int) -> tuple[Segment, ...]:
    return (Segment("system", tokens),) if tokens > 0 else ()
