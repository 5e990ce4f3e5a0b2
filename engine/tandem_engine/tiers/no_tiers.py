"""An engine without tiers: `KvTiers` as the engine's loop uses it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from tandem_contract.kv_reference import StoreAnswer

from ..scheduler import Step
from ..step import Chunk
from ..step import Sequence as EngineSequence
from ..types import Delta
from .arriving import ArrivingKv
from .handoff import NOT_CONFIGURED, Put, is_store_answer, with_answer

_NOTHING: Final = StoreAnswer(tandem_kv_not_stored=NOT_CONFIGURED)


class NoTiers:
    """KV lies on the device only."""

    def deliver(self, seq: EngineSequence, delta: Delta, put: Put) -> None:
        put(with_answer(delta, _NOTHING) if is_store_answer(seq, delta) else delta)

    def may_load(self, _: EngineSequence) -> bool:
        return False

    def apply(self, step: Step) -> None: ...

    def load(self, _: EngineSequence) -> bool:
        return False

    def arriving(self, request_id: str) -> ArrivingKv:
        raise ValueError(f"{request_id} is not loading")

    def is_loading(self, _: str) -> bool:
        return False

    def cancel(self, request_id: str) -> None:
        raise ValueError(f"{request_id} is not loading")

    def observe_step(self, chunks: Sequence[Chunk], seconds: float) -> None: ...

    def save(self, seq: EngineSequence) -> None: ...

    def saving(self, _: Sequence[Chunk]) -> AbstractContextManager[None]:
        return nullcontext()

    async def close(self) -> None: ...


NO_TIERS: Final = NoTiers()
