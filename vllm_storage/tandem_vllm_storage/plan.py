"""What to look up, to load and to save of each request. Pure.

A chunk is saved in the step that completes its KV. The tokens of a chunk must be known to the
scheduler and final: those of the prompt, and of the answer all but the newest, whose KV the next
step computes. With speculative decoding, tokens that were not verified are not among them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from tandem_contract.kv_reference import LoadLeg
from tandem_kvstore.format.identity import Prompt

from .messages import RankChunks

_CONTENT_HASH: Final = re.compile(r"(?:.*:)?(?:[0-9a-f]{64}|[0-9a-f]{128})", re.DOTALL)
"""vLLM's identifier of media by their content: a digest in hexadecimals, after the adapter's name
where an adapter changes how media are encoded. A client may have sent a name of its own instead."""
REMOTE_PREFILL: Final = "do_remote_prefill"
"""Key of kv_transfer_params: another connector brings this prompt's KV."""


class Lookup(StrEnum):
    """Where a request stands."""

    NEW = "new"
    ASKED = "asked"
    """A look-up is running."""
    FOUND = "found"
    LOADING = "loading"
    OVER = "over"
    """The answer is 0 until the request ends: nothing to load, or its load failed."""


@dataclass(slots=True)
class RequestState:
    """One request, as the scheduler's side knows it."""

    lookup: Lookup = Lookup.NEW
    first_chunk: int = 0
    """Chunk at which the look-up began."""
    began: int = 0
    """When the look-up began, in `StoredChunks.clock`."""
    found_chunks: int = 0
    """Leading chunks, from the prompt's first, that the store has."""
    deadline: float = 0.0
    """Seconds that the load may take."""
    leg: LoadLeg | None = None
    """The hand-off that brings the KV; its end is counted as a transfer."""
    look_up_seconds: float = 0.0
    """Of the hand-off's time, those that the look-up took."""
    saved_chunks: int = 0
    """Chunks from the first that were saved, or are in the store already."""
    chains: RankChunks = ()
    """The request's chunks as far as they are known, for each rank."""


def external_tokens(state: RequestState, computed: int, chunk_tokens: int) -> int:
    """Tokens to load after `computed` tokens that are cached locally."""
    return max(0, state.found_chunks * chunk_tokens - computed)


def first_chunk(computed: int, tokens: int, chunk_tokens: int) -> int | None:
    """The chunk at which a load begins; None: no full chunk is missing.

    The last token is computed in any case, so a chunk that would bring only that is not loaded.
    """
    first = computed // chunk_tokens
    if tokens // chunk_tokens <= first or computed >= tokens - 1:
        return None
    return first


def savable_tokens(computed: int, scheduled: int, prompt: int, known: int) -> int:
    """Tokens whose KV is complete and final after a step.

    `computed` before the step, `scheduled` in it, `prompt` tokens of the prompt, `known` tokens of
    the request so far.
    """
    return min(computed + scheduled, max(prompt, known - 1))


def load_span(computed: int, external: int, block: int, chunk: int) -> tuple[range, int]:
    """The blocks that a load's chunks lie in, and how many of the first are already computed."""
    start = computed // chunk * chunk
    return range(start // block, (computed + external) // block), (computed - start) // block


def storable_prompt(
    token_ids: Sequence[int],
    *,
    cache_salt: str | None,
    adapter: str,
    media: Sequence[tuple[int, str | None]],
    has_embeddings: bool,
) -> Prompt | None:
    """What the keys of a prompt depend on; None: KV of this prompt must not be stored.

    `media`: positions and vLLM's identifiers. Under a name that a client chose, another prompt may
    have another image.
    """
    known = [(position, content) for position, content in media if content]
    if has_embeddings or len(known) < len(media):
        return None
    if not all(_CONTENT_HASH.fullmatch(content) for _, content in known):
        return None
    return Prompt(token_ids, cache_salt or "", adapter, tuple(known))


def is_handed_over(params: Mapping[str, Any] | None) -> bool:
    """Whether another connector brings the request's KV."""
    return bool(params and params.get(REMOTE_PREFILL))
