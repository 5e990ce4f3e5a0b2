"""Hand-offs through storage: when prefill legs are answered, and what decode legs may load.

    prefill   begin ─► prompt computed ─► writes ended ─► seen in the store ─► answer
              the request generates tokens meanwhile, for at most StoreLeg.timeout seconds
    decode    LoadLeg ─► named_chunks ─► found within LoadLeg's time limit ─► loaded

vLLM sends an answer in the step that ends the request, and its loop must not wait for a store. So a
prefill leg goes on generating, one token in each step, until its KV is visible in the store. The
sidecar drops these tokens.
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
"""Share of a prefill leg's time that is kept for its look-up while its writes run. Less: the
look-up of a slow store does not end in time. More: the leg waits less for its writes."""


def read_leg(request_id: str, params: Mapping[str, Any] | None) -> StoreLeg | LoadLeg | None:
    """The leg of a hand-off through storage that `kv_transfer_params` describe; None: no leg.

    Parameters that cannot be read are logged and ignored: vLLM computes the prompt.
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
    """The chunks that the decode leg's reference covers, of the prompt's `chunks`. None: the
    reference is not one that this engine would write for this prompt."""
    reference = leg.tandem_kv_reference
    if (reason := refusal(reference, chunks, client.reference)) is not None:
        _log.warning("%s: stored KV not loaded, recomputing: %s", request_id, reason)
        return None
    return [chunk for chunk in chunks if chunk.token_count <= reference.token_count]


async def find_named(client: StoreClient, chunks: Sequence[Chunk], limit: float) -> Decision:
    """How many leading chunks the store has, and as the deadline what is left of `limit`
    seconds."""
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
    """By the monotonic clock. None: the leg was not looked at since its prompt was computed."""
    look_up: Future[Decision] | None = None
    began: int = 0
    """When the look-up began, in `StoredChunks.clock`."""
    chunks: Sequence[Chunk] = ()
    """Chunks of the look-up: all of the prompt, or those before the first that is being saved."""
    answer: StoreAnswer | None = None


class PrefillLegs:
    """The running prefill legs of one engine. For the scheduler's thread."""

    def __init__(
        self,
        thread: StoreThread,
        stored: StoredChunks,
        chunks_of: Callable[[Any], Sequence[Chunk]],
        chunk_tokens: int,
        max_model_len: int,
    ) -> None:
        """`chunks_of`: the full chunks of a request's prompt, with the keys of rank 0; empty if its
        KV must not be stored. `max_model_len`: tokens of the longest sequence."""
        self._thread, self._stored, self._chunks_of = thread, stored, chunks_of
        self._chunk_tokens, self._max_model_len = chunk_tokens, max_model_len
        self._legs: dict[str, _PrefillLeg] = {}

    def begin(self, request: Any, leg: StoreLeg) -> None:
        """Keep the request running until its KV is in the store. Later calls have no effect."""
        # Not with a grammar, which may end the answer after its first token. That leg names no KV,
        # and the decode engine looks the prompt up by itself.
        if request.request_id not in self._legs and not request.use_structured_output:
            self._legs[request.request_id] = _PrefillLeg(request, leg.timeout)
            longest = self._max_model_len - request.num_prompt_tokens
            _set_max_tokens(request, max(longest, request.max_tokens))

    def advance(self, client: StoreClient) -> None:
        """End the legs whose answer is known. Called once in each step."""
        for leg in self._legs.values():
            if leg.answer is None and leg.request.num_output_tokens:
                leg.answer = self._answer(client, leg)
                if leg.answer is not None:
                    # The leg ends with the token of this step, or with one that is on its way.
                    _set_max_tokens(leg.request, leg.request.num_output_tokens)

    def finish(self, request_id: str) -> dict[str, Any] | None:
        """Forget an ended request. Returns its `kv_transfer_params`; None: no leg, or no answer."""
        leg = self._legs.pop(request_id, None)
        if leg is None:
            return None
        if leg.look_up is not None:
            leg.look_up.cancel()
        answer: dict[str, Any] | None = msgspec.to_builtins(leg.answer) if leg.answer else None
        return answer

    def _answer(self, client: StoreClient, leg: _PrefillLeg) -> StoreAnswer | None:
        """The answer to a leg; None: not known yet."""
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
                reserve = _LOOK_UP_SHARE * leg.timeout if leg.chunks else 0.0
                if left > reserve:
                    return None
            if left <= 0:
                return StoreAnswer(tandem_kv_not_stored=Reason.TIMEOUT)
            # Also for chunks that were written long ago: the store may have deleted them.
            leg.began = self._stored.clock
            leg.look_up = self._thread.submit(find_named(client, leg.chunks, left))
        if not leg.look_up.done():
            return None
        decision = leg.look_up.result()
        self._stored.remove_lost(leg.chunks[decision.chunks :], decision.reason, leg.began)
        if not decision.chunks:
            return StoreAnswer(tandem_kv_not_stored=decision.reason or Reason.MISSING)
        return StoreAnswer(tandem_kv_reference=client.reference(leg.chunks[decision.chunks - 1]))


def _set_max_tokens(request: Any, count: int) -> None:
    """vLLM's scheduler reads the request's value, some model runners that of its sampling
    parameters."""
    request.max_tokens = request.sampling_params.max_tokens = count
