"""model.cache with the library that engines download with: a replaced pod downloads nothing."""

import os
import sys
from asyncio import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from .fake_hub import COMMIT, FakeHub, serving
from .rendered_pods import engine, rendered

pytestmark = pytest.mark.component

PULL = "from huggingface_hub import snapshot_download as f; print(f('org/model', revision='v1'))"


@pytest.fixture
async def hub() -> AsyncIterator[FakeHub]:
    async with serving(FakeHub()) as fake:
        yield fake


async def start_pod(claim: Path, home: Path, **env: str) -> str:
    """Load the model as an engine does, with the pod's variables; returns its directory."""
    model = {"name": "org/model", "revision": "v1", "cache": {"claimName": "hub"}}
    container = engine(rendered({"model": model}, {})[0])
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == "model-cache")
    (cache,) = (v["value"] for v in container["env"] if v["name"] == "HF_HUB_CACHE")
    directory = claim / Path(cache).relative_to(mount["mountPath"])
    home.mkdir()
    process = await subprocess.create_subprocess_exec(
        *(sys.executable, "-c", PULL),
        env={"PATH": os.environ["PATH"], "HOME": str(home), "HF_HUB_CACHE": str(directory), **env},
        stdout=subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode().strip()


async def test_a_replaced_pod_downloads_no_file_again(hub: FakeHub, tmp_path: Path) -> None:
    claim = tmp_path / "claim"
    first = await start_pod(claim, tmp_path / "first", HF_ENDPOINT=hub.url)
    assert Path(first).name == COMMIT
    assert hub.requests["GET"] == 1
    assert await start_pod(claim, tmp_path / "second", HF_ENDPOINT=hub.url) == first
    assert (hub.requests["GET"], hub.requests["revision"]) == (1, 2)


async def test_offline_it_asks_nothing(hub: FakeHub, tmp_path: Path) -> None:
    claim = tmp_path / "claim"
    first = await start_pod(claim, tmp_path / "first", HF_ENDPOINT=hub.url)
    asked = hub.requests.total()
    offline = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "1"}
    assert await start_pod(claim, tmp_path / "second", **offline) == first
    assert hub.requests.total() == asked
