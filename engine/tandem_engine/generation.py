"""The stream of one request's deltas, from the engine's loop to the caller of `submit`."""

import asyncio
from collections.abc import Callable

from .types import Delta


class Generation:
    """Async iterator of deltas; the delta with a finish_reason is the last.

    Closing the iterator before its end aborts the request.
    """

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._abort = abort
        self._deltas: asyncio.Queue[Delta] = asyncio.Queue()
        self._is_over = False
        self._is_read = False

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> Delta:
        if self._is_read:
            raise StopAsyncIteration
        delta = await self._deltas.get()
        self._is_read = delta.finish_reason is not None
        return delta

    async def aclose(self) -> None:
        """Abort the request unless it has ended; the iterator is exhausted afterwards."""
        # Before the abort, whose last delta has no reader any more.
        self._is_read = True
        self._abort(self.request_id)

    def put(self, delta: Delta) -> None:
        """Append a delta; called by the engine. Deltas after the last are dropped."""
        if not self._is_over:
            self._is_over = delta.finish_reason is not None
            self._deltas.put_nowait(delta)
