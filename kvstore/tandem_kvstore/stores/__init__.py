"""Clients of three kinds of stores, S3, HTTP and files: objects by name in one namespace.

`open_store` chooses the client by the location's protocol. No client knows what an object means.
"""

from ..location import Protocol, StoreLocation
from .base import ObjectInfo, ObjectStore, TaggedObject
from .files import FileStore
from .http import HttpStore

__all__ = ["FileStore", "HttpStore", "ObjectInfo", "ObjectStore", "TaggedObject", "open_store"]


def open_store(location: StoreLocation) -> ObjectStore:
    """A client of the store at `location`; nothing is connected yet.

    Raises LocationError when credentials or the certificate authority cannot be read.
    """
    match location.protocol:
        case Protocol.FILE:
            return FileStore(location.directory)
        case Protocol.HTTP:
            return HttpStore(location)
        case Protocol.S3:
            # Its library takes a tenth of a second to import.
            from .s3 import S3Store  # noqa: PLC0415

            return S3Store(location)
