"""The decider: one request's routing path, from a few figures. Pure. The first line that holds:

no prefill backend is configured, or one engine must serve the request alone  -> unified
the prompt is shorter than `non_cached_tokens` or `prompt_tokens`             -> unified
it is cached on the decode pod, but for at most MAX_UNSPLIT_BLOCKS blocks            -> fast_decode
the decode pod loads it from external storage, but for its end               -> fast_decode
fewer than `non_cached_tokens` tokens are left to compute                     -> unified
no prefill backend is healthy                                                 -> fallback, or error
otherwise                                                                     -> prefill_then_decode
"""

from dataclasses import dataclass

from tandem_contract.paths import RoutingPath
from tandem_planner.storage import NO_LOAD, Load, is_served_from_storage

from ...choice.result import MAX_UNSPLIT_BLOCKS, PathDecision, SplitImpossible


@dataclass(frozen=True, slots=True)
class DeciderSettings:
    """The decider's settings: when to split a request."""

    split: bool = True
    """False: never split (llm-d's disagg-profile-handler without a prefill decider)."""
    always: bool = False
    """True: split whatever the prompt's length and the cache (always-disagg-pd-decider)."""
    non_cached_tokens: int = 128
    """Prompt tokens left to compute from which a hand-off is worth its round trips (llm-d's
    `nonCachedTokens`); 0: never split. The default is eight blocks of 16 tokens: to compute fewer
    takes about as long as a hand-off, on small and large models alike. Too low: short prompts pay
    for a transfer. Too high: prompts are computed between other requests' decode steps."""
    prompt_tokens: int = 0
    """Length of a prompt, in tokens, from which it may be split at all (llm-d's `promptTokens`)."""
    fallback_to_unified: bool = True
    """Whether a request that cannot be split is served by one engine instead of refused."""
    max_prefill_on_decode: int | None = None
    """As in `DisaggregatedServing`."""


@dataclass(frozen=True, slots=True)
class DeciderInputs:
    """The request, and the pod chosen to decode it."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV is believed to be on the decode pod."""
    block_tokens: int
    """The decode pod's KV block size, or that of the prefix index at the prompt's end where it is
    larger, in tokens."""
    is_disaggregated: bool
    """Whether some other backend, healthy or not, may prefill for the decode pod."""
    has_prefill_candidate: bool
    """Whether a healthy backend can hand off to the decode pod."""
    single_engine_reason: str | None = None
    """Why one engine must serve the request alone, in one word; None when it may be split."""
    load: Load = NO_LOAD
    """What the decode pod would load from external storage."""
    is_enabled: bool = True
    """Whether disaggregation is enabled (`routing.split`)."""
    is_unified: bool = False
    """Whether the pod chosen to decode is a unified pod, which prefills, too."""


def decide_path(inputs: DeciderInputs, settings: DeciderSettings) -> PathDecision:
    """The path for a request. Raises SplitImpossible."""
    if (reason := _unified_reason(inputs, settings)) is not None:
        return PathDecision(RoutingPath.UNIFIED, reason)
    uncached = inputs.prompt_tokens - inputs.cached_tokens
    # The prompt's length comes before the cache: to compute a short prompt is cheaper than any
    # hand-off, so its reason does not depend on what is cached.
    is_limited = _is_limited(inputs, settings)
    if not settings.always and not is_limited:
        if inputs.prompt_tokens < max(settings.non_cached_tokens, settings.prompt_tokens):
            return PathDecision(RoutingPath.UNIFIED, "short_prompt")
        if (reason := _fast_decode_reason(inputs, uncached)) is not None:
            return PathDecision(RoutingPath.FAST_DECODE, reason)
        if uncached < settings.non_cached_tokens:
            return PathDecision(RoutingPath.UNIFIED, "mostly_cached")
    # Only here does health count: a request that is not worth a split is no fallback.
    if inputs.has_prefill_candidate:
        reason = "always" if settings.always else "prefill_limit" if is_limited else "worth_it"
        return PathDecision(RoutingPath.PREFILL_THEN_DECODE, reason)
    return without_prefill(settings)


def without_prefill(settings: DeciderSettings) -> PathDecision:
    """The path of a request that should be split where no backend can prefill. Raises
    SplitImpossible."""
    if not settings.fallback_to_unified:
        raise SplitImpossible("no prefill backend is healthy")
    return PathDecision(RoutingPath.FALLBACK, "no_prefill_backend")


def is_split(inputs: DeciderInputs, settings: DeciderSettings) -> bool:
    """Whether the decider splits the request; False where `decide_path` would raise."""
    return inputs.has_prefill_candidate and (
        decide_path(inputs, settings).path is RoutingPath.PREFILL_THEN_DECODE
    )


def _is_limited(inputs: DeciderInputs, settings: DeciderSettings) -> bool:
    """Whether the decode pod may not compute as many tokens as are not cached."""
    limit = settings.max_prefill_on_decode
    if limit is None or inputs.is_unified:
        return False
    return max(1, inputs.prompt_tokens - inputs.cached_tokens - inputs.load.tokens) > limit


def _fast_decode_reason(inputs: DeciderInputs, uncached: int) -> str | None:
    """Why the decode pod needs no prefill; None: it may."""
    # A prompt of which nothing is cached is no fast decode, however short it is.
    if inputs.cached_tokens and uncached <= MAX_UNSPLIT_BLOCKS * inputs.block_tokens:
        return "cached"
    if is_served_from_storage(inputs.prompt_tokens, inputs.cached_tokens, inputs.load):
        return "stored"
    return None


def _unified_reason(inputs: DeciderInputs, settings: DeciderSettings) -> str | None:
    """Why a split is out of the question, before its cost is looked at."""
    if not inputs.is_disaggregated:
        return "not_disaggregated"
    if (
        not inputs.is_enabled
        or not settings.split
        or (settings.non_cached_tokens == 0 and not settings.always)
    ):
        return "split_off"
    return inputs.single_engine_reason
