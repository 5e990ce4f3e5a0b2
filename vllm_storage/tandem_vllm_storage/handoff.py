"""Hand-offs through storage: the prefill engine's answers, and what a decode engine may load.

    prefill   begin ─► prompt computed ─► writes ended ─► seen in the store ─► answer
              the request generates tokens meanwhile, for at most StoreLeg.timeout seconds
    decode    LoadLeg ─► named_chunks ─► found within LoadLeg's time limit ─► loaded

vLLM sends a request's answer in the step that ends it, and its loop must not wait for a store. So a
prefill leg goes on generating until its KV is visible: one more token in each step that the engine
makes for other requests anyway. The sidecar drops these tokens.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from tandem_contract.kv_reference import (
    REFERENCE,
    SHORT,
    STORE,
    KvReferenceUnusable,
    LoadLeg,
    StoreAnswer,
    StoreLeg,
    load_leg,
)
from tandem_kvstore.chunk_store import Chunk
from tandem_kvstore.client import StoreClient
from tandem_kvstore.errors import Reason
from tandem_kvstore.guard.load_guard import Decision
from tandem_kvstore.references import refusal

from .store_thread import StoreThread
from .stored_chunks import StoredChunks

_log = logging.getLogger(__name__)

_LOOK_UP_SHARE: Final = 0.1
"""Share of a leg's time that is left for its look-up, however long its writes take. Less: a store
that is slow to write has no time to say what it has. More: a leg waits less for its writes."""


def read_leg(request_id: str, params: Mapping[str, Any] | None) -> StoreLeg | LoadLeg | None:
    """The request's part in a hand-off through storage, of `kv_transfer_params`; None: no part.

    What cannot be read is logged and ignored: vLLM computes the prompt.
    """
    if not params:
        return None
    try:
        if STORE in params:
            return msgspec.convert(params[STORE], StoreLeg)
        return load_leg(params) if REFERENCE in params else None
    except (msgspec.ValidationError, KvReferenceUnusable) as err:
        _log.warning("%s: kv_transfer_params are ignored: %s", request_id, err)
        return None


def named_chunks(
    request_id: str, leg: LoadLeg, chunks: Sequence[Chunk], client: StoreClient
) -> Sequence[Chunk] | None:
    """The chunks that the decode leg names, of the prompt's `chunks`. None: it does not name KV of
    this prompt in the namespace of this engine."""
    reference = leg.tandem_kv_reference
    if (reason := refusal(reference, chunks, client.reference)) is not None:
        _log.warning("%s: stored KV not loaded, recomputing: %s", request_id, reason)
        return None
    return [chunk for chunk in chunks if chunk.token_count <= reference.token_count]


async def find_named(client: StoreClient, chunks: Sequence[Chunk], limit: float) -> Decision:
    """How many leading chunks are in the store, and the seconds that are left of `limit`."""
    start = time.monotonic()
    try:
        async with asyncio.timeout(limit):
            count, reason = await client.find(chunks)
    except TimeoutError:
        return Decision(0, 0.0, Reason.TIMEOUT)
    except Exception:  # noqa: BLE001 - a defect here must cost a recompute, never vLLM's scheduler
        _log.exception("looking up KV of a hand-off failed with an internal error")
        return Decision(0, 0.0, Reason.OTHER)
    return Decision(count, limit - (time.monotonic() - start), reason)


@dataclass(slots=True)
class _PrefillLeg:
    request: Any
    timeout: float
    deadline: float | None = None
    """On the monotonic clock; None: the prompt is not computed yet."""
    look_up: Future[Decision] | None = None
    began: int = 0
    """When the look-up began, in `StoredChunks.clock`."""
    chunks: Sequence[Chunk] = ()
    """What is looked up: all chunks, or those before the first that was still being saved."""
    answer: StoreAnswer | None = None


class PrefillLegs:
    """The prefill legs of one engine that have no answer yet. For the scheduler's thread."""

    def __init__(
        self,
        thread: StoreThread,
        stored: StoredChunks,
        chunks_of: Callable[[Any], Sequence[Chunk]],
        chunk_tokens: int,
        max_model_len: int,
    ) -> None:
        """`chunks_of`: the full chunks of a request's prompt, with the keys of rank 0; none, too,
        if it must not be stored. `max_model_len`: tokens of the longest sequence."""
        self._thread, self._stored, self._chunks_of = thread, stored, chunks_of
        self._chunk_tokens, self._max_model_len = chunk_tokens, max_model_len
        self._legs: dict[str, _PrefillLeg] = {}

    def begin(self, request: Any, leg: StoreLeg) -> None:
        """Keep the request until its KV is in the store. Again for the same request: no effect."""
        # A grammar may end the answer after its first token: such a leg ends when it does, and
        # names nothing. The decode engine then looks the prompt up by itself.
        if request.request_id not in self._legs and not request.use_structured_output:
            self._legs[request.request_id] = _PrefillLeg(request, leg.timeout)
            longest = self._max_model_len - request.num_prompt_tokens
            _set_max_tokens(request, max(longest, request.max_tokens))

    def advance(self, client: StoreClient) -> None:
        """Once in each step: let legs end whose answer is known."""
        for leg in self._legs.values():
            if leg.answer is None and leg.request.num_output_tokens:
                leg.answer = self._answer(client, leg)
                if leg.answer is not None:
                    # With the token of this step, or with one that is on its way.
                    _set_max_tokens(leg.request, leg.request.num_output_tokens)

    def finish(self, request_id: str) -> dict[str, Any] | None:
        """Forget an ended request; returns its `kv_transfer_params`, None without an answer."""
        leg = self._legs.pop(request_id, None)
        if leg is None:
            return None
        if leg.look_up is not None:
            leg.look_up.cancel()
        answer: dict[str, Any] | None = msgspec.to_builtins(leg.answer) if leg.answer else None
        return answer

    def _answer(self, client: StoreClient, leg: _PrefillLeg) -> StoreAnswer | None:
        """None: not yet."""
        now = time.monotonic()
        if leg.deadline is None:
            leg.deadline = now + leg.timeout
        chunks = self._chunks_of(leg.request)
        if not chunks:
            is_short = leg.request.num_prompt_tokens < self._chunk_tokens
            return StoreAnswer(tandem_kv_not_stored=SHORT if is_short else Reason.OTHER)
        if leg.look_up is None:
            leg.chunks = self._stored.before_saving(chunks)
            left = leg.deadline - now
            if len(leg.chunks) < len(chunks):
                kept = _LOOK_UP_SHARE * leg.timeout if leg.chunks else 0.0
                if left > kept:
                    return None
            if left <= 0:
                return StoreAnswer(tandem_kv_not_stored=Reason.TIMEOUT)
            # Also chunks that were written long ago: the store may have deleted them since.
            leg.began = self._stored.clock
            leg.look_up = self._thread.submit(find_named(client, leg.chunks, left))
        if not leg.look_up.done():
            return None
        found = leg.look_up.result()
        self._stored.remove_lost(leg.chunks[found.chunks :], found.reason, leg.began)
        if not found.chunks:
            return StoreAnswer(tandem_kv_not_stored=found.reason or Reason.MISSING)
        return StoreAnswer(tandem_kv_reference=client.reference(leg.chunks[found.chunks - 1]))


def _set_max_tokens(request: Any, count: int) -> None:
    """vLLM's scheduler reads the request's own, some model runners that of its parameters."""
    request.max_tokens = request.sampling_params.max_tokens = count
