import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ..sidecar.real.engine import Engine, engines
from ..sidecar.real.fixtures import decode, prefill, second_prefill, shared_engines

__all__ = ["decode", "prefill", "second_prefill", "shared_engines"]


@pytest.fixture
async def strict(tmp_path: Path) -> AsyncIterator[Engine]:
    """A decode engine that fails a request whose KV it cannot load."""
    [engine] = engines(tmp_path, strict={"role": "kv_consumer", "policy": "fail"})
    try:
        await engine.up()
        yield engine
    finally:
        with contextlib.suppress(ProcessLookupError):
            engine.kill()
