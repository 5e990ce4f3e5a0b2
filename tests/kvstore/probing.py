"""A process that probes a store, loads from it and prints both results, with a changed clock."""

import asyncio
import sys

from tandem_kvstore.probe import probe_store

from .servers import s3_location

print(asyncio.run(probe_store(s3_location(sys.argv[1]))))
