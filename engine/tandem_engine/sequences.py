"""The sequences of one call, from submission to the last piece.

    sequences = submit(engine, requests, …)
    async for sequence, piece in merge_pieces(sequences): …
    for sequence in sequences: sequence.close()

Errors: `ApiError`: 500 when the engine fails, 503 when it aborts. `RequestRejected` at submission.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Protocol

from tandem_contract.timing import Timing
from tandem_contract.transfer_params import TransferParams

from .answers import Choice
from .body import ApiError
from .metrics import SequenceTimes
from .observer import Stats
from .output import OutputText, Piece
from .types import Delta, FinishReason, Request


class ServedEngine(Protocol):
    """The methods of an engine that the server calls."""

    @property
    def healthy(self) -> bool: ...

    def submit(self, request: Request) -> AsyncIterator[Delta]:
        """Start a sequence. Raises RequestRejected."""

    def abort(self, request_id: str) -> None:
        """End a sequence and free its blocks. Its last delta has finish_reason `abort`."""

    def release_hold(self, request_id: str) -> None:
        """Free a finished prompt's KvHold when its transfer parameters reached no client."""

    async def wait_until_unheld(self) -> None:
        """Return once no KvHold is left."""

    async def release_remote_hold(self, params: TransferParams) -> None:
        """Have a producer free KV that will not be read."""

    def stats(self) -> Stats: ...


class RunningSequence:
    """One sequence of a call: turns the engine's deltas into pieces of the answer."""

    def __init__(
        self,
        engine: ServedEngine,
        request: Request,
        *,
        choice: Choice,
        output: OutputText,
        times: SequenceTimes,
    ) -> None:
        """Submits `request`. Raises RequestRejected."""
        self._engine = engine
        self._request_id = request.request_id
        self._output = output
        self._times = times
        self._ended = False
        self._deltas = engine.submit(request)
        self.choice = choice
        self.started = False
        """Whether a piece was written to the client."""
        self.timing: Timing | None = None
        self.kv_transfer_params: dict[str, object] | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.choice.prompt_token_ids)

    @property
    def completion_tokens(self) -> int:
        return self._output.tokens

    async def next(self) -> Piece:
        """The next piece; the piece with a finish_reason is the last. Raises ApiError."""
        delta = await anext(self._deltas, None)
        if delta is None or delta.finish_reason == "abort":
            self._end("abort")
            raise ApiError(503, "the engine ended this request: it is shutting down")
        if delta.finish_reason == "error":
            self._end("error")
            raise ApiError(500, delta.error or "the engine failed")
        # The engine sends each of these once, with the first token or with the last.
        self.timing = self.timing or delta.timing
        self.kv_transfer_params = self.kv_transfer_params or delta.kv_transfer_params
        piece = self._output.push(delta)
        # A delta whose text is held back counts as well: the engine has generated its tokens.
        if piece.token_ids:
            self._times.observe_tokens()
        if piece.finish_reason is not None:
            if delta.finish_reason is None:
                # A stop string ended the sequence. The engine works on tokens and goes on.
                self._engine.abort(self._request_id)
            self._end(piece.finish_reason)
        return piece

    def abort(self) -> None:
        """End the sequence in the engine; `next` then raises ApiError 503."""
        if not self._ended:
            self._engine.abort(self._request_id)

    def close(self) -> None:
        """Abort the sequence if it still runs; its pieces are not read any more."""
        # Engines ignore an abort of an ended request, but it must be counted once only.
        if not self._ended:
            self._engine.abort(self._request_id)
            self._end("abort")

    def release_hold(self) -> None:
        """Free its KvHold: the client has not received the transfer parameters."""
        self._engine.release_hold(self._request_id)

    def _end(self, reason: FinishReason) -> None:
        self._ended = True
        self._times.observe_end(reason, self.timing)


async def merge_pieces(
    sequences: Sequence[RunningSequence],
) -> AsyncGenerator[tuple[RunningSequence, Piece], None]:
    """The pieces of all `sequences` in order of arrival, until each has ended. Raises ApiError."""
    # The common case, without a task for each piece.
    if len(sequences) == 1:
        sequence, is_last = sequences[0], False
        while not is_last:
            piece = await sequence.next()
            is_last = piece.finish_reason is not None
            yield sequence, piece
        return
    turns = {asyncio.ensure_future(sequence.next()): sequence for sequence in sequences}
    try:
        while turns:
            done, _ = await asyncio.wait(turns, return_when=asyncio.FIRST_COMPLETED)
            for turn in done:
                sequence, piece = turns.pop(turn), turn.result()
                if piece.finish_reason is None:
                    turns[asyncio.ensure_future(sequence.next())] = sequence
                yield sequence, piece
    finally:
        # Also after an error in one sequence: the pending reads of the others must end.
        for turn in turns:
            turn.cancel()
        await asyncio.gather(*turns, return_exceptions=True)
