from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tandem_local.runner import Runner


@pytest.fixture
async def runner(tmp_path: Path) -> AsyncIterator[Runner]:
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "k1").write_text("secret")
    runner = Runner(tmp_path / "run", secrets={"plan-keys": keys}, stop_timeout=5)
    yield runner
    await runner.stop()
