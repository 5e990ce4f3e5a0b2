"""Prefill pods of an unsigned header in random order."""

import pytest

from ..conftest import Harness
from ..wire import wire


@pytest.mark.parametrize("sample", [True, False])
async def test_the_first_pod_of_the_header_is_asked_or_any(harness: Harness, sample: bool) -> None:
    prefills = [await harness.prefill() for _ in range(2)]
    await harness.start(sample_prefillers=sample)
    named = "x-prefiller-host-port: " + ",".join(str(each.address) for each in prefills)
    async with wire(harness.sidecar.listen) as client:
        # A random choice misses one of two pods in 40 requests once in 10^12 runs.
        for _ in range(40):
            client.post(b'{"model": "m", "prompt": "p", "max_tokens": 1}', named)
            assert (await client.response()).status == 200
    asked = [len(each.requests) for each in prefills]
    assert sum(asked) == 40
    assert (asked[1] > 0) is sample
