"""The operations that `chunk_store` and the collector need from a store."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ..format.tensors import Buffer

UNFINISHED: Final = ".tmp-"
"""Start of the names under which directories keep objects that are being written. Other stores list
no such objects."""


@dataclass(frozen=True, slots=True)
class TaggedObject:
    """An object's bytes, and the tag that conditional writes compare."""

    data: Buffer
    tag: str | None
    """The ETag; None if the store has none."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An entry of a listing."""

    name: str
    size: int
    modified: float
    """Unix seconds, by the store's clock."""


class ObjectStore(Protocol):
    """Objects of one namespace. Names have no slash. All methods raise StoreError."""

    async def get(self, name: str, limit: int, *, is_cut: bool = False) -> Buffer:
        """The object's bytes. Raises ObjectMissing; ObjectTooLarge if it has more than `limit`.

        `is_cut`: return the first `limit` bytes of a longer object instead of raising.
        """

    async def get_tagged(self, name: str, limit: int) -> TaggedObject:
        """As `get`, with the object's tag. From an S3 store this takes longer."""

    async def put(self, name: str, parts: Sequence[Buffer]) -> None:
        """Write the object, or replace it, in one step: readers never see a part of it."""

    async def put_if(self, name: str, parts: Sequence[Buffer], tag: str | None) -> None:
        """Write the object if the stored one has `tag`; None: if there is no object of this name.

        Raises ObjectExists if the condition is not met, StoreUnsupported if the store does not
        check conditions.
        """

    async def delete(self, name: str) -> None:
        """Delete the object. Does nothing if it does not exist."""

    async def info(self, name: str) -> ObjectInfo:
        """The object's line of a listing, of which stores may round the time to seconds.
        Raises ObjectMissing."""

    def scan(self) -> AsyncIterator[ObjectInfo]:
        """List all objects, in a directory also UNFINISHED ones. Raises StoreUnsupported if the
        store has no listing."""

    async def close(self) -> None:
        """Close the connections."""
