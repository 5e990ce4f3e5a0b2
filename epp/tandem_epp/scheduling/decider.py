"""Split or not: one request's routing path, from a few figures. Pure.

no backends to split between, or the request is one engine's by rule  -> unified
shorter than `non_cached_tokens`                                      -> unified
all cached on the decode pick but a last, partial block or two        -> fast_decode
fewer than `non_cached_tokens` left to compute                        -> unified
no prefill backend answers                                            -> fallback, or refused
else                                                                  -> prefill_then_decode
"""

from dataclasses import dataclass
from typing import Final

from tandem_contract.paths import RoutingPath

TAIL_BLOCKS: Final = 2
"""The last block is partial, and the one before it ends in the answer's start or a bracket."""


class SplitImpossible(Exception):
    """A split is wanted, no prefill backend is healthy, and serving without one is not allowed."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The decider's settings."""

    split: bool = True
    """False: never split (llm-d's disagg-profile-handler without a prefill decider)."""
    always: bool = False
    """Split whatever the length and the cache say (llm-d's always-disagg-pd-decider)."""
    non_cached_tokens: int = 128
    """Tokens left to compute from which a hand-off is worth its round trips (llm-d's
    `nonCachedTokens`; 0: never split). Eight blocks of 16: the time to compute fewer is of the
    order of one hand-off, on small and large models alike. Too low: short prompts pay for a
    transfer; too high: prompts are computed between other requests' decodes."""
    fallback_to_unified: bool = True
    """Serve without the split when it is impossible."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known of the request and of its decode pick."""

    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, on the decode pick."""
    block_tokens: int
    """The decode pick's block size."""
    configured: bool
    """Disaggregation is enabled, and a backend other than the decode pick is there to prefill,
    healthy or not; not both of them unified, which is no disaggregation."""
    prefill_ready: bool
    """A prefill candidate other than the decode pick is healthy."""
    one_engine: str | None = None
    """Why the request must not be split, if it must not."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The path, and why in one word: a metric label."""

    path: RoutingPath
    reason: str


def decide(situation: Situation, rules: Rules) -> Verdict:
    """The path for a request in `situation`. Raises SplitImpossible."""
    if (reason := _why_not(situation, rules)) is not None:
        return Verdict(RoutingPath.UNIFIED, reason)
    left = situation.prompt_tokens - situation.cached_tokens
    if not rules.always:
        if situation.prompt_tokens < rules.non_cached_tokens:
            return Verdict(RoutingPath.UNIFIED, "short_prompt")
        if left <= TAIL_BLOCKS * situation.block_tokens:
            return Verdict(RoutingPath.FAST_DECODE, "cached")
        if left < rules.non_cached_tokens:
            return Verdict(RoutingPath.UNIFIED, "mostly_cached")
    if situation.prefill_ready:
        return Verdict(RoutingPath.PREFILL_THEN_DECODE, "always" if rules.always else "worth_it")
    if not rules.fallback_to_unified:
        raise SplitImpossible("no prefill backend is healthy")
    return Verdict(RoutingPath.FALLBACK, "no_prefill_backend")


def splits(situation: Situation, rules: Rules) -> bool:
    """Whether a request in `situation` is handed across."""
    return situation.prefill_ready and (
        decide(situation, rules).path is RoutingPath.PREFILL_THEN_DECODE
    )


def _why_not(situation: Situation, rules: Rules) -> str | None:
    if not situation.configured:
        return "not_disaggregated"
    if not rules.split or (rules.non_cached_tokens == 0 and not rules.always):
        return "split_off"
    return situation.one_engine
