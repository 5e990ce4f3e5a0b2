"""The sequences of one call, from submission to the last piece.

    sequences = submit(engine, requests, …)
    async for sequence, piece in merge_pieces(sequences): …
    for sequence in sequences: sequence.close()

Errors: `ApiError`: 400 when the engine rejects a request, 500 when it fails, 503 when it aborts.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Protocol

from tandem_contract.timing import Timing
from tandem_contract.transfer_params import TransferParams

from .answers import Choice
from .body import ApiError
from .metrics import SequenceTimes, StatsView
from .output import OutputText, Piece
from .types import Delta, FinishReason, Request


class ServedEngine(Protocol):
    """What the server needs of an engine."""

    @property
    def healthy(self) -> bool: ...

    def submit(self, request: Request) -> AsyncIterator[Delta]:
        """Start a sequence. Raises RequestRejected."""

    def abort(self, request_id: str) -> None:
        """End a sequence and free its blocks; its iterator ends with finish_reason `abort`."""

    def release_hold(self, request_id: str) -> None:
        """Free a finished prompt's KV that no reader was told of."""

    async def wait_until_unheld(self) -> None:
        """Return once no finished prompt's KV waits for a reader."""

    async def release_remote_hold(self, params: TransferParams) -> None:
        """Tell a producer that nobody will read."""

    def stats(self) -> StatsView: ...


class RunningSequence:
    """One sequence of a call: its engine deltas as pieces."""

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
        """Whether a piece has been written to the client."""
        self.timing: Timing | None = None
        self.kv_transfer_params: dict[str, object] | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.choice.prompt_token_ids)

    @property
    def completion_tokens(self) -> int:
        return self._output.tokens

    async def next(self) -> Piece:
        """The next piece; nothing follows the one with a finish_reason. Raises ApiError."""
        delta = await anext(self._deltas, None)
        if delta is None or delta.finish_reason == "abort":
            self._end("abort")
            raise ApiError(503, "the engine ended this request: it is shutting down")
        if delta.finish_reason == "error":
            self._end("error")
            raise ApiError(500, delta.error or "the engine failed")
        self.timing = self.timing or delta.timing
        self.kv_transfer_params = self.kv_transfer_params or delta.kv_transfer_params
        piece = self._output.push(delta)
        if piece.token_ids:
            self._times.tokens()
        if piece.finish_reason is not None:
            if delta.finish_reason is None:
                # A stop string ended it: the engine does not know.
                self._engine.abort(self._request_id)
            self._end(piece.finish_reason)
        return piece

    def abort(self) -> None:
        """End it in the engine; `next` then raises ApiError."""
        if not self._ended:
            self._engine.abort(self._request_id)

    def close(self) -> None:
        """Nobody reads on. Aborts what still runs."""
        if not self._ended:
            self._engine.abort(self._request_id)
            self._end("abort")

    def release_hold(self) -> None:
        """The client never learned where its KV is: nobody will read it."""
        self._engine.release_hold(self._request_id)

    def _end(self, reason: FinishReason) -> None:
        self._ended = True
        self._times.finished(reason)


async def merge_pieces(
    sequences: Sequence[RunningSequence],
) -> AsyncGenerator[tuple[RunningSequence, Piece], None]:
    """The pieces of all `sequences` as they come, until each has finished. Raises ApiError."""
    if len(sequences) == 1:
        only, finished = sequences[0], False
        while not finished:
            piece = await only.next()
            finished = piece.finish_reason is not None
            yield only, piece
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
        for turn in turns:
            turn.cancel()
        await asyncio.gather(*turns, return_exceptions=True)
