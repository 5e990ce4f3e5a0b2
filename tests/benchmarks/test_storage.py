"""`benchmarks.storage`: its parts run, and the load without verification verifies nothing."""

from unittest import mock

import pytest
from benchmarks import storage

from tandem_kvstore import checksums

pytestmark = pytest.mark.component


async def test_the_cost_of_checksums_is_measured(versitygw_program: None) -> None:
    hashed: list[bool] = []
    content_hash = storage.content_hash

    def noted(parts: object) -> str:
        hashed.append(True)
        return content_hash(parts)  # type: ignore[arg-type]

    async with storage.s3_server() as url:
        with mock.patch.object(checksums, "content_hash", noted):
            bench = storage.Bench(url, storage.MIB)
            await bench.write(bench.chunks(901))
            written = len(hashed)
            await bench.read(bench.chunks(901))
            await bench.read_rear(bench.chunks(901))
        assert len(hashed) - written == 2 * written > 0
        figure = await storage.checksum_cost(url, 1, 1)
    assert (figure.unit, figure.target) == ("%", "<= 10")
    # Put back for the engine's own loads.
    assert checksums.content_hash is content_hash
