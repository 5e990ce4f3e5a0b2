"""The Job's program, run as its containers run it, with a hub on loopback."""

import asyncio
import json
import os
import ssl
import sys
from asyncio import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trustme

from tandem_operator.planning.model_pulls import PARTS
from tandem_operator.pods.model_download import File, needed_files, split_files

from .fake_hub import COMMIT, REPOSITORY, FakeHub, serving

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"t" * 100,
    "model-00001-of-00002.safetensors": b"a" * 3000,
    "model-00002-of-00002.safetensors": b"b" * 2000,
    "pytorch_model.bin": b"c" * 5000,
    "original/consolidated.00.pth": b"d" * 5000,
}
NEEDED = {name: len(data) for name, data in FILES.items() if not name.endswith((".bin", ".pth"))}
LOAD = "from huggingface_hub import snapshot_download as f; print(f('org/model', revision='{}'))"
_RUN = (
    "import sys; from pathlib import Path; from tandem_operator.pods.model_download import main;"
    " sys.exit(main(sys.argv[2:], Path(sys.argv[1])))"
)


@pytest.fixture
async def hub() -> AsyncIterator[FakeHub]:
    async with serving(FakeHub(FILES)) as fake:
        yield fake


class Pod:
    """Containers of one pod of the Job: a claim, a home directory, variables."""

    def __init__(self, hub: FakeHub, folder: Path, **env: str) -> None:
        self.claim, self.home = folder / "claim", folder / "home"
        for directory in (self.claim, self.home):
            directory.mkdir(exist_ok=True)
        self.env = {
            "PATH": os.environ["PATH"], "HOME": str(self.home), "HF_HUB_CACHE": str(self.claim),
            "HF_ENDPOINT": hub.url, **env,
        }  # fmt: skip

    async def run(self, command: str, *arguments: str) -> tuple[int, str]:
        """Exit code and termination message of a container."""
        message = self.home / "message"
        plan = str(self.home / "plan.json")
        code, _ = await self.python(_RUN, str(message), command, plan, REPOSITORY, *arguments)
        return code, message.read_text()

    async def python(self, *arguments: str, **env: str) -> tuple[int, str]:
        process = await subprocess.create_subprocess_exec(
            *(sys.executable, "-c", *arguments), env=self.env | env, stdout=subprocess.PIPE
        )
        output, _ = await process.communicate()
        return process.returncode or 0, output.decode().strip()


@pytest.mark.component
async def test_the_parts_together_are_the_model(hub: FakeHub, tmp_path: Path) -> None:
    hub.token = "secret"
    pod = Pod(hub, tmp_path, HF_TOKEN="secret")
    code, message = await pod.run("resolve", "v1", str(PARTS))
    assert code == 0
    total = {"bytes": sum(NEEDED.values()), "files": len(NEEDED)}
    assert json.loads(message) == {"commit": COMMIT, **total}
    reports = []
    for index in range(PARTS):
        code, message = await pod.run("part", str(index))
        assert code == 0
        reports.append(json.loads(message))
    assert {name: sum(r[name] for r in reports) for name in total} == total
    assert dict(hub.downloads) == dict.fromkeys(NEEDED, 1)
    # A retried Job downloads nothing again.
    assert (await pod.run("part", "0"))[0] == 0
    assert dict(hub.downloads) == dict.fromkeys(NEEDED, 1)
    # And an engine with the commit as its revision asks the hub for nothing.
    asked = hub.requests.total()
    code, snapshot = await pod.python(LOAD.format(COMMIT), HF_HUB_OFFLINE="1")
    assert code == 0
    weights = Path(snapshot, "model-00001-of-00002.safetensors")
    assert weights.read_bytes() == FILES[weights.name]
    assert hub.requests.total() == asked


@pytest.mark.component
async def test_failures_say_what_to_do(hub: FakeHub, tmp_path: Path) -> None:
    pod = Pod(hub, tmp_path)
    hub.token = "secret"
    code, message = await pod.run("resolve", "v1", str(PARTS))
    assert code == 1
    assert "org/model is gated" in message
    assert "tokenSecretRef" in message
    hub.token = None
    code, message = await pod.run("resolve", "v9", str(PARTS))
    assert (code, "correct model.revision" in message) == (1, True)
    hub.refusal = 404, "RepoNotFound"
    code, message = await pod.run("resolve", "v1", str(PARTS))
    assert (code, "has no repository org/model" in message) == (1, True)
    hub.refusal = 400, "Other"
    code, message = await pod.run("resolve", "v1", str(PARTS))
    assert (code, "refused a request about org/model" in message) == (1, True)
    pod.env["HF_ENDPOINT"] = "http://127.0.0.1:9"
    code, message = await pod.run("resolve", "v1", str(PARTS))
    assert code == 1
    assert "cannot download org/model from http://127.0.0.1:9" in message
    assert "HTTPS_PROXY" in message


@pytest.mark.component
async def test_trouble_with_authorities_does_not_blame_the_network(
    hub: FakeHub, tmp_path: Path
) -> None:
    pod = Pod(hub, tmp_path, SSL_CERT_FILE="/authority/ca.crt")
    code, message = await pod.run("resolve", "v1", str(PARTS))
    assert code == 1
    assert "SSL_CERT_FILE names /authority/ca.crt, which is not there" in message
    del pod.env["SSL_CERT_FILE"]
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(tls)
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=tls)
    async with server:
        port = server.sockets[0].getsockname()[1]
        pod.env["HF_ENDPOINT"] = f"https://127.0.0.1:{port}"
        code, message = await pod.run("resolve", "v1", str(PARTS))
    assert (code, "name it in SSL_CERT_FILE" in message) == (1, True)


@pytest.mark.component
async def test_a_claim_that_takes_no_files_is_named(hub: FakeHub, tmp_path: Path) -> None:
    pod = Pod(hub, tmp_path)
    assert (await pod.run("resolve", "v1", str(PARTS)))[0] == 0
    # A file where the library makes a directory; permissions would not stop root.
    Path(pod.claim, "models--org--model").write_text("")
    code, message = await pod.run("part", "0")
    assert code == 1
    assert message.startswith("the claim of model.cache cannot take the files")


def test_weights_in_other_formats_count_only_without_safetensors() -> None:
    files = [File(name, len(data)) for name, data in FILES.items()]
    assert {file.name for file in needed_files(files)} == set(NEEDED)
    old = [File("pytorch_model.bin", 5), File("config.json", 1)]
    assert needed_files(old) == old


def test_parts_have_about_the_same_size() -> None:
    files = [File(str(size), size) for size in (9, 8, 4, 4, 3, 2)]
    parts = split_files(files, 3)
    assert [sum(file.size for file in part) for part in parts] == [9, 11, 10]
    assert [len(part) for part in split_files(files[:1], 3)] == [1, 0, 0]
