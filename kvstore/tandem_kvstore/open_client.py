"""Opens an engine's access to a store: the store's client, its chunks, and their maintenance."""

from .bounds_file import BoundsReader
from .chunk_store import ChunkStore
from .client import StoreClient
from .collector import OnRemoved
from .format.identity import KvIdentity
from .location import StoreLocation
from .maintenance import Maintenance
from .observer import Observer
from .stores import open_store


def open_client(
    location: StoreLocation,
    identity: KvIdentity,
    observer: Observer,
    *,
    chunk_bytes: int,
    bounds: BoundsReader | None = None,
    on_removed: OnRemoved = lambda _: None,
) -> StoreClient:
    """A client of the store at `location`, for the running event loop; nothing is connected yet.

    With `bounds` the client also writes touch records, and collects the namespace if it is elected:
    `on_removed` then gets the keys that it deletes. `chunk_bytes`: bytes of a chunk's tensors.

    Raises LocationError when credentials or the certificate authority cannot be read.
    """
    objects = open_store(location)
    maintenance = None
    if bounds is not None:
        maintenance = Maintenance(objects, bounds, on_removed)
        maintenance.start()
    return StoreClient(
        ChunkStore(objects, location, identity),
        objects,
        observer,
        chunk_tokens=identity.chunk_tokens,
        chunk_bytes=chunk_bytes,
        maintenance=maintenance,
    )
