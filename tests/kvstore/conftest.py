"""Fixtures: every test of `server` runs against the three kinds of stores."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from .servers import Server, file_store, store_in_this_process, versitygw


@pytest.fixture(params=["file", "http", "s3"])
async def server(
    request: pytest.FixtureRequest, tmp_path: Path, versitygw_program: None
) -> AsyncIterator[Server]:
    """A running, empty store."""
    async with AsyncExitStack() as stack:
        if request.param == "file":
            yield file_store(tmp_path)
        elif request.param == "http":
            yield await stack.enter_async_context(store_in_this_process(tmp_path))
        else:
            yield await stack.enter_async_context(versitygw(tmp_path))
