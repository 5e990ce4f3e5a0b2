"""The layer groups of one running step, as they are computed, for saves that copy them meanwhile.

worker       layer 0, 1, …  ──on_layer──► layers of group 1 ──on_layer──► …  sampled token
event loop          group 0 is computed ──► wait returns                     end
"""

import asyncio
from collections.abc import Sequence


class StepLayers:
    """One step. `on_layer` is for its thread, `is_running` for any, all else for the event loop."""

    def __init__(self, layers: Sequence[int]) -> None:
        """`layers`: number of layers in the groups 0 to i, for each i."""
        self._loop = asyncio.get_running_loop()
        self._layers = layers
        self._groups = [asyncio.Event() for _ in layers]
        self.is_running = True
        """Whether the step goes on: layers that `on_layer` named may be queued on a device and not
        computed."""

    def on_layer(self, layers: int) -> None:
        """See `Llama.forward`."""
        # The loop is woken once for each group, not for each layer.
        if layers in self._layers:
            self._loop.call_soon_threadsafe(self._groups[self._layers.index(layers)].set)

    def end(self) -> None:
        """The step has ended, well or not: all waits return."""
        self.is_running = False
        for group in self._groups:
            group.set()

    async def wait(self, group: int) -> None:
        """Return when the step's thread is past the group with this index, or the step's end."""
        await self._groups[group].wait()
