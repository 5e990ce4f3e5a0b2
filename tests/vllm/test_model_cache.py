"""vLLM reads a cache that the program of `model.cache.prePull` has filled, and asks no hub."""

from pathlib import Path

import aiohttp
import pytest

from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_operator.planning.model_pulls import PARTS

from ..operator.fake_hub import COMMIT, REPOSITORY, FakeHub, serving
from ..operator.test_model_download import Pod
from .engines import MODEL_NAME
from .single import single_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


async def test_vllm_starts_offline_from_the_downloaded_commit(
    model: Path, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    files = {file.name: file.read_bytes() for file in model.iterdir()}
    async with serving(FakeHub(files)) as hub:
        job = Pod(hub, tmp_path)
        assert (await job.run("resolve", "v1", str(PARTS)))[0] == 0
        for part in range(PARTS):
            assert (await job.run("part", str(part)))[0] == 0
    # The hub has ended. The arguments are those of a pod whose revision pins the commit.
    env = {"HF_HUB_CACHE": str(job.claim), "HOME": str(tmp_path)}
    with single_vllm(
        Path(REPOSITORY), tmp_path, "--revision", COMMIT, env=env, imports_anew=True
    ) as vllm:
        await vllm.ready()
        body = {"model": MODEL_NAME, "prompt": "hello", "max_tokens": 4}
        async with http.post(vllm.url + PATHS[RequestKind.COMPLETIONS], json=body) as answer:
            assert answer.status == 200, await answer.text()
