"""An engine without tiers, and what the engine's loop needs of tiers."""

from collections.abc import Sequence
from typing import Final, Protocol

from ..scheduler import Step
from ..step import Chunk
from ..step import Sequence as EngineSequence


class Tiers(Protocol):
    """`KvTiers`, as the engine's loop uses it."""

    def may_load(self, seq: EngineSequence) -> bool: ...
    def apply(self, step: Step) -> None: ...
    def is_loading(self, request_id: str) -> bool: ...
    def cancel(self, request_id: str) -> None: ...
    def observe_step(self, chunks: Sequence[Chunk], seconds: float) -> None: ...
    def save(self, seq: EngineSequence) -> None: ...
    async def close(self) -> None: ...


class _NoTiers:
    """KV lies on the device only."""

    def may_load(self, _: EngineSequence) -> bool:
        return False

    def apply(self, step: Step) -> None: ...

    def is_loading(self, _: str) -> bool:
        return False

    def cancel(self, request_id: str) -> None:
        raise ValueError(f"{request_id} is not loading")

    def observe_step(self, chunks: Sequence[Chunk], seconds: float) -> None: ...

    def save(self, seq: EngineSequence) -> None: ...

    async def close(self) -> None: ...


NO_TIERS: Final = _NoTiers()
