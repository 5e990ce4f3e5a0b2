"""KV that is loaded layer group by layer group while the tokens after it are computed.

    event loop   load ──group 0 is here──► on_start    group 1 is here      load ends ──► join
    worker            layer 0, 1, …  ──wait(n)── layers of group 1 ──wait(n)── …  sampled token

A layer is computed when its stored KV is verified and in the blocks. When a group of some chunk
cannot be used, the waiting worker gets `LayersCut`: the step is dropped, and the rest of the prompt
is computed after what the load brought as a whole. Nothing of a dropped step is kept: its blocks
are not in the prefix cache, and no token of it leaves the engine.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence


class LayersCut(Exception):
    """Stored KV that a step waits for does not come."""


class ArrivingKv:
    """One load. `wait` is for the worker thread, all else for the event loop."""

    def __init__(
        self, layers: Sequence[int], on_start: Callable[[int], None], on_cut: Callable[[], None]
    ) -> None:
        """`layers`: number of layers in the groups 0 to i, for each i. `on_start` gets the number
        of chunks that come, once the first group of each is here; `on_cut`: some do not come."""
        self._layers, self._on_start, self._notify_cut = layers, on_start, on_cut
        self._chunks = 0
        self._condition = threading.Condition()
        self._available, self._is_closed, self._is_interrupted = 0, False, False
        self._ended = asyncio.Event()
        self.ended_at = 0.0
        """time.perf_counter() at the load's end; 0 before."""

    def on_chain(self, chunks: int) -> None:
        """See tandem_kvstore.chain.LayerWatch."""
        self._chunks = chunks

    def on_group(self, index: int) -> None:
        """See tandem_kvstore.chain.LayerWatch."""
        with self._condition:
            self._available = self._layers[index]
            self._condition.notify_all()
        if index == 0:
            self._on_start(self._chunks)

    def on_cut(self) -> None:
        """See tandem_kvstore.chain.LayerWatch."""
        self._close()
        self._notify_cut()

    def end(self) -> None:
        """The load has ended, and its result is known to the engine."""
        self._close()
        self.ended_at = time.perf_counter()
        self._ended.set()

    def wait(self, layers: int) -> None:
        """Return when the stored KV of the first `layers` layers is in the blocks.

        Raises LayersCut when it does not come, or not before `interrupt`.
        """
        with self._condition:
            self._condition.wait_for(
                lambda: self._available >= layers or self._is_closed or self._is_interrupted
            )
            if self._available < layers:
                raise LayersCut

    def start_step(self) -> None:
        """A step is about to compute on the layers."""
        with self._condition:
            self._is_interrupted = False

    def interrupt(self) -> None:
        """Drop the step if it waits for layers; the load goes on, and another step may follow."""
        with self._condition:
            self._is_interrupted = True
            self._condition.notify_all()

    async def join(self) -> None:
        """Return when the load has ended."""
        await self._ended.wait()

    def _close(self) -> None:
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
