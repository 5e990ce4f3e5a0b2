"""An ended request is freed by reference counting, without the cycle collector."""

import gc

import pytest

from tandem_http1.connection import Call
from tandem_http1.messages import Request
from tandem_sidecar.handoff.driver import HandoffDriver
from tandem_sidecar.handoff.forward import Forward

from ..conftest import Harness

BODY = b'{"model": "m", "prompt": "Hi"}'


def uncollected() -> list[object]:
    kinds = (Forward, HandoffDriver, Request, Call)
    # `isinstance` reads `__class__` of every object in the process, and some of them warn.
    return [instance for instance in gc.get_objects() if issubclass(type(instance), kinds)]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize("split", [False, True])
async def test_an_ended_request_is_freed_without_the_cycle_collector(
    harness: Harness, path: str, split: bool
) -> None:
    await harness.prefill()
    await harness.start()
    headers = harness.candidates if split else {}
    gc.collect()
    gc.disable()
    try:
        before = len(uncollected())
        for _ in range(8):
            async with harness.http.post(harness.url(path), data=BODY, headers=headers) as answer:
                await answer.read()
        assert len(uncollected()) == before
    finally:
        gc.enable()
