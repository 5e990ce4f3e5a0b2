"""A process that writes one chunk, group after group, for a test that kills it in between."""

import asyncio
import sys

from tandem_kvstore.chunk_store import ChunkStore
from tandem_kvstore.location import store_location
from tandem_kvstore.stores import open_store

from .kv import IDENTITY, chain, layer_groups
from .servers import NAMESPACE, s3_location


async def main(endpoint: str, kind: str) -> None:
    location = s3_location(endpoint) if kind else store_location(endpoint, NAMESPACE)
    chunk = chain(1, 1)[0]
    store = ChunkStore(open_store(location), location, IDENTITY, in_flight=1, max_inline=0)
    await store.put(chunk, layer_groups(chunk, writer=1))


asyncio.run(main(*sys.argv[1:]))
