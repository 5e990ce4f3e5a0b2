"""A process that probes versitygw and prints the result, for a test that changes its clock."""

import asyncio
import sys

from tandem_kvstore.probe import probe_store

from .servers import s3_location

print(asyncio.run(probe_store(s3_location(sys.argv[1]))))
