"""The secondary tier of vLLM's OffloadingConnector, against vLLM's interface; no GPU."""

import asyncio
import os
from pathlib import Path

import pytest

from .engines import ON_A_CPU, VENV
from .storage import packages

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


async def test_rows_are_stored_loaded_and_verified(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    process = await asyncio.create_subprocess_exec(
        str(VENV / "bin/python"),
        str(Path(__file__).with_name("secondary_tier_script.py")),
        str(store),
        env={"PATH": os.environ["PATH"], **ON_A_CPU, "PYTHONPATH": packages(tmp_path)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
