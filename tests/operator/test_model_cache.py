"""model.cache with the library that engines download with: a replaced pod downloads nothing."""

import os
import sys
from asyncio import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from .rendered_pods import engine, rendered

pytestmark = pytest.mark.component

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PULL = "from huggingface_hub import snapshot_download as f; print(f('org/model', revision='v1'))"


class FakeHub:
    """The Hugging Face hub's API for one repository with one file; counts requests."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.url = ""

    async def revision(self, _request: web.Request) -> web.Response:
        self.requests["revision"] += 1
        files = [{"rfilename": "config.json"}]
        return web.json_response({"id": "org/model", "sha": COMMIT, "siblings": files})

    async def tree(self, _request: web.Request) -> web.Response:
        return web.json_response([{"type": "file", "path": "config.json", "size": 2, "oid": "e1"}])

    async def file(self, request: web.Request) -> web.Response:
        self.requests[request.method] += 1
        headers = {"ETag": '"e1"', "X-Repo-Commit": COMMIT}
        return web.Response(body=b"{}", headers=headers)


@pytest.fixture
async def hub() -> AsyncIterator[FakeHub]:
    fake = FakeHub()
    app = web.Application()
    app.router.add_get("/api/models/org/model/revision/v1", fake.revision)
    app.router.add_get(f"/api/models/org/model/tree/{COMMIT}", fake.tree)
    app.router.add_get(f"/org/model/resolve/{COMMIT}/config.json", fake.file)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    fake.url = "http://{}:{}".format(*runner.addresses[0])
    yield fake
    await runner.cleanup()


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
