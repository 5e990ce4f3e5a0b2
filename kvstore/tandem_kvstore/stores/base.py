"""What `chunk_store` and the collector need from a store."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..format.tensors import Buffer


@dataclass(frozen=True, slots=True)
class TaggedObject:
    """An object's bytes and the tag that conditional writes compare."""

    data: Buffer
    tag: str | None
    """ETag; None where the store has none."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One line of a listing."""

    name: str
    size: int
    modified: float
    """Unix seconds, by the store's clock."""


class ObjectStore(Protocol):
    """Objects of one namespace. Names have no slash. All methods raise StoreError."""

    async def get(self, name: str, limit: int, *, is_cut: bool = False) -> Buffer:
        """The object's bytes. Raises ObjectMissing, and ObjectTooLarge above `limit` bytes.

        `is_cut`: of an object above `limit` bytes, the first `limit` bytes instead of the error.
        """

    async def get_tagged(self, name: str, limit: int) -> TaggedObject:
        """As `get`, with the object's tag. An S3 store takes longer for it."""

    async def put(self, name: str, parts: Sequence[Buffer]) -> None:
        """Write the object as a whole, replacing any other: readers see all of it or nothing."""

    async def put_if(self, name: str, parts: Sequence[Buffer], tag: str | None) -> None:
        """Write the object if the present one has `tag`; None: if there is none.

        Raises ObjectExists when that is not so, StoreUnsupported when the store cannot tell.
        """

    async def delete(self, name: str) -> None:
        """Remove the object; one that is missing is no error."""

    def scan(self) -> AsyncIterator[ObjectInfo]:
        """Every object. Raises StoreUnsupported where the store has no listing."""

    async def close(self) -> None:
        """End connections."""
