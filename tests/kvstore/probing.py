"""A process that uses a store as an engine does, for a test that changes its clock.

Prints one JSON object: what the probe of `tandem doctor` says, and how loads and a write ended.
"""

import asyncio
import json
import sys
import time
from dataclasses import asdict

from tandem_kvstore.collector import Collector
from tandem_kvstore.format.collection import Bounds
from tandem_kvstore.location import store_location
from tandem_kvstore.probe import probe_store

from .kv import chain, client, group_specs, layer_groups
from .servers import NAMESPACE, s3_location

MAX_AGE = 1800.0
LOADS = 4


async def use(protocol: str, endpoint: str) -> dict[str, object]:
    """Load stored chunks, collect what is too old, load again, and write a chunk."""
    location = s3_location(endpoint) if protocol == "s3" else store_location(endpoint, NAMESPACE)
    guarded, behind, counts = client(location)
    chunks, (new,) = chain(1, 3), chain(2, 1)
    reasons = []
    for _ in range(LOADS):
        result = await guarded.load(chunks, group_specs(), behind.deliver, context=0)
        behind.assert_delivered(chunks[: result.chunks])
        reasons.append(result.reason)
    removed = None
    if guarded.guard.breaker.allows:
        collector = Collector(behind.objects, lambda: Bounds(1 << 30, MAX_AGE))
        collection = await collector.collect()
        assert collection is not None
        removed = [*collection.manifests, *collection.data]
    is_stored = await guarded.store(new, layer_groups(new))
    probed = await probe_store(location)
    await guarded.close()
    return {
        "time": time.time(), "probe": asdict(probed), "reasons": reasons, "removed": removed,
        "loaded": counts.loaded, "not_loaded": counts.not_loaded, "failures": counts.failures,
        "is_stored": is_stored, "not_stored": counts.not_stored,
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(asyncio.run(use(*sys.argv[1:]))))
