"""One side's clock is an hour wrong: prompts are computed or loaded, and no KV leaves too early."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tandem_kvstore.errors import Reason
from tandem_kvstore.server.capacity import Capacity

from .kv import chain, engine, group_specs
from .probing import LOADS, MAX_AGE
from .servers import SECRET_KEY, Server, tandem_store, versitygw
from .skew import SECONDS, clock_library

pytestmark = [
    pytest.mark.component,
    pytest.mark.usefixtures("gcc_program"),
]


async def use_with(library: str, protocol: str, server: Server) -> dict[str, Any]:
    """What a process with another clock reports of the store."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.kvstore.probing", protocol, server.location.endpoint),
        env=os.environ | {"LD_PRELOAD": library},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output, log = await process.communicate()
    assert process.returncode == 0, log.decode()
    assert SECRET_KEY not in (output + log).decode()
    report: dict[str, Any] = json.loads(output)
    assert abs(report["time"] - time.time()) > SECONDS / 2
    return report


async def put_prompt(server: Server) -> None:
    writer = engine(server.location)
    await writer.put_all(chain(1, 3))
    await writer.chunks.close()


@pytest.mark.parametrize("seconds", [SECONDS, -SECONDS])
async def test_s3_refuses_loads_with_a_wrong_clock_and_the_breaker_opens(
    tmp_path: Path, versitygw_program: None, seconds: int
) -> None:
    library = clock_library(tmp_path, seconds)
    async with versitygw(tmp_path / "objects") as server:
        await put_prompt(server)
        report = await use_with(library, "s3", server)
    assert report["reasons"] == [Reason.DENIED] * (LOADS - 1) + [Reason.BREAKER_OPEN]
    assert report["not_loaded"] == {Reason.DENIED: 3 * (LOADS - 1), Reason.BREAKER_OPEN: 3}
    assert report["loaded"] == 0
    words = "the store refused the signature's time: set both clocks"
    assert set(report["failures"]) == {words}
    assert (report["is_stored"], report["not_stored"]) == (False, {Reason.BREAKER_OPEN: 1})
    assert f"its clock differs by {'-' if seconds > 0 else '+'}" in report["probe"]["detail"]


@pytest.mark.parametrize("seconds", [SECONDS, -SECONDS])
async def test_an_engine_with_a_wrong_clock_loads_from_tandem_store_and_removes_nothing(
    tmp_path: Path, seconds: int
) -> None:
    assert MAX_AGE < SECONDS
    library = clock_library(tmp_path, seconds)
    async with tandem_store(tmp_path / "objects") as server:
        await put_prompt(server)
        report = await use_with(library, "http", server)
    assert (report["reasons"], report["loaded"]) == ([None] * LOADS, 3 * LOADS)
    assert (report["is_stored"], report["probe"]["works"]) == (True, True)
    # Its collector found nothing too old, although its clock says so.
    assert report["removed"] == []


async def test_tandem_store_with_a_wrong_clock_is_read(tmp_path: Path) -> None:
    library, flags = clock_library(tmp_path, SECONDS), ("--max-age", "30m")
    async with tandem_store(tmp_path / "objects", *flags, preload=library) as server:
        await put_prompt(server)
        await assert_all_there(server)
    # Corrected while the server was down.
    async with tandem_store(tmp_path / "objects", *flags) as server:
        await assert_all_there(server)


async def assert_all_there(server: Server) -> None:
    reader = engine(server.location)
    chunks = chain(1, 3)
    assert (await reader.chunks.fetch(chunks, group_specs(), reader.deliver)).chunks == 3
    reader.assert_delivered(chunks)
    await reader.chunks.close()


async def test_chunks_that_a_wrong_clock_makes_old_leave_as_a_whole(tmp_path: Path) -> None:
    async with tandem_store(tmp_path) as server:
        await put_prompt(server)
        # A second server, whose clock is ahead, over the same directory.
        capacity = Capacity(tmp_path, 1 << 30, MAX_AGE)
        capacity.scan()
        await capacity.remove_old(time.time())
        await assert_all_there(server)
        await capacity.remove_old(time.time() + SECONDS)
        reader = engine(server.location)
        outcome = await reader.chunks.fetch(chain(1, 3), group_specs(), reader.deliver)
        assert (outcome.chunks, outcome.reason) == (0, Reason.MISSING)
        assert not list(server.directory.iterdir())
        await reader.chunks.close()
