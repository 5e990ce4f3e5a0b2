"""What each request looks up, loads and saves. Pure.

A chunk is saved in the step that completes its KV, if the scheduler knows its tokens and they are
final. That holds for all tokens of the prompt, and for those of the answer but the newest, whose KV
the next step computes. Speculated tokens that were not verified are not final.
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
"""vLLM's identifier of a media item by its content: a hexadecimal digest, after the adapter's name
if an adapter changes how media are encoded. A client may send a name of its own instead."""
REMOTE_PREFILL: Final = "do_remote_prefill"
"""Key of kv_transfer_params: another connector brings this prompt's KV."""


class Lookup(StrEnum):
    """State of a request's look-up and load."""

    NEW = "new"
    ASKED = "asked"
    """A look-up is running."""
    FOUND = "found"
    LOADING = "loading"
    OVER = "over"
    """Nothing to load, or the load failed: the answer is 0 until the request ends."""


@dataclass(slots=True)
class RequestState:
    """What the scheduler's side knows about a request."""

    lookup: Lookup = Lookup.NEW
    first_chunk: int = 0
    """Chunk at which the look-up began."""
    began: int = 0
    """When the look-up began, in `StoredChunks.clock`."""
    found_chunks: int = 0
    """Leading chunks of the prompt that are cached or that the store has."""
    deadline: float = 0.0
    """Seconds that the load may take."""
    leg: LoadLeg | None = None
    """The decode leg whose KV is not loaded yet; its end is counted as a transfer."""
    look_up_seconds: float = 0.0
    """Seconds that the look-up of a hand-off took."""
    saved_chunks: int = 0
    """Leading chunks for which a save was considered."""
    chains: RankChunks = ()
    """The request's chunks whose keys were computed so far, by rank."""


def external_tokens(state: RequestState, computed: int, chunk_tokens: int) -> int:
    """Tokens to load after `computed` tokens that are in the engine's cache."""
    return max(0, state.found_chunks * chunk_tokens - computed)


def first_chunk(computed: int, tokens: int, chunk_tokens: int) -> int | None:
    """The chunk at which a load begins; None: there is nothing to load.

    vLLM always computes the last token, so a chunk is not loaded for that token alone.
    """
    first = computed // chunk_tokens
    if tokens // chunk_tokens <= first or computed >= tokens - 1:
        return None
    return first


def savable_tokens(computed: int, scheduled: int, prompt: int, known: int) -> int:
    """Tokens whose KV is complete and final after a step.

    `computed`: tokens before the step. `scheduled`: tokens in it. `prompt`: tokens of the prompt.
    `known`: tokens of the request so far.
    """
    return min(computed + scheduled, max(prompt, known - 1))


def load_span(computed: int, external: int, block: int, chunk: int) -> tuple[range, int]:
    """The blocks of a load's chunks, and how many of the first ones are already computed."""
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

    `media`: positions and vLLM's identifiers. An identifier that a client chose may stand for
    another image in another prompt.
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
