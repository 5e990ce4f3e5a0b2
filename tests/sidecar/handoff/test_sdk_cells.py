"""Every API, whole and streamed, with every failure of a hand-off, by clients that users have."""

import asyncio

import pytest

from ..cells import CELLS, Cell, check
from ..conftest import Harness
from ..fake_vllm import script
from ..peers import hangs
from ..sdks import Server

pytestmark = pytest.mark.component


@pytest.mark.parametrize("cell", CELLS, ids=str)
async def test_the_client_gets_the_answer_or_its_own_error(harness: Harness, cell: Cell) -> None:
    failure = cell.failure
    prefill = await harness.prefill(failure.prefill and script(failure.prefill))
    if failure.refuses:
        prefill.close_port()
    await harness.start(script(failure.decode), **failure.settings)
    if failure.hangs:
        harness.decode.health = hangs
    server = Server(harness.url(""), harness.candidates)
    checked = asyncio.create_task(check(cell, server))
    if failure.drains:
        phase = "answering" if cell.stream else "decoding"
        async with asyncio.timeout(10):
            while phase not in [w.describe()["phase"] for w in harness.sidecar.lifecycle.work]:
                await asyncio.sleep(0.01)
        harness.sidecar.lifecycle.drain()
    await checked
