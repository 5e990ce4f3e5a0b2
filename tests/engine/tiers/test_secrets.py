"""A store's keys appear nowhere: not in logs, metrics, answers or the command line of an engine."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from tandem_contract import metrics as names
from tandem_local.ports import free_port

from ...epp.real import until
from ...kvstore.servers import ACCESS_KEY, NAMESPACE, SECRET_KEY, versitygw
from ..engines import tiny_model

pytestmark = pytest.mark.component

START_SECONDS = 120.0
"""Seconds in which an engine starts and stores: importing torch takes long on a busy machine."""


WRONG = "a-wrong-key-that-must-not-appear"
TOKEN = "a-session-token-that-must-not-appear"


@pytest.mark.parametrize(
    ("secret", "is_profile"), [(SECRET_KEY, False), (WRONG, False), (WRONG, True)]
)
async def test_keys_are_shown_nowhere(
    tmp_path: Path, versitygw_program: None, secret: str, is_profile: bool
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "access_key").write_text(ACCESS_KEY)
    (keys / "secret_key").write_text(secret)
    (keys / "shared").write_text(
        f"[kv]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {secret}\n"
        f"aws_session_token = {TOKEN}\n"
    )
    shared = {"AWS_SHARED_CREDENTIALS_FILE": str(keys / "shared"), "AWS_PROFILE": "kv"}
    access = {"protocol": "s3"} if is_profile else {"credentials_dir": str(keys)}
    port = free_port("127.0.0.1")
    async with versitygw(tmp_path / "objects") as server:
        storage = {
            "endpoint": server.location.endpoint,
            "kv_namespace": NAMESPACE,
            **access,
            "chunk_tokens": 32,
        }
        command = (
            *(sys.executable, "-m", "tandem_engine.main", "--model", str(tiny_model())),
            *("--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)),
            *("--num-gpu-blocks-override", "64", "--kv-storage-config", json.dumps(storage)),
        )
        engine = await asyncio.create_subprocess_exec(
            *command,
            env=os.environ | (shared if is_profile else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            shown = await use(f"http://127.0.0.1:{port}", is_denied=secret != SECRET_KEY)
        finally:
            engine.terminate()
            log, _ = await engine.communicate()
    shown += log.decode() + " ".join(command)
    for key in (secret, ACCESS_KEY, TOKEN):
        assert key not in shown
    if secret != SECRET_KEY:
        assert "the store refused the credentials" in shown


async def use(url: str, *, is_denied: bool) -> str:
    """Send a request; wait until its KV was stored or refused. Returns all that can be read."""
    page = ""
    counter = names.ENGINE_STORAGE_NOT_STORED if is_denied else names.ENGINE_TIER_STORED
    label = 'reason="denied"' if is_denied else 'tier="storage"'
    async with aiohttp.ClientSession(url) as http:

        async def is_ready() -> bool:
            try:
                async with http.get("/health") as answer:
                    return answer.status == 200
            except aiohttp.ClientError:
                return False

        async def is_counted() -> bool:
            nonlocal page
            async with http.get("/metrics") as answer:
                page = await answer.text()
            lines = [x for x in page.splitlines() if x.startswith(counter) and label in x]
            return bool(lines) and float(lines[0].rpartition(" ")[2]) > 0

        await until(is_ready, within=START_SECONDS)
        body = {"model": "m", "prompt": list(range(4, 104)), "max_tokens": 1}
        async with http.post("/v1/completions", json=body) as answer:
            assert answer.status == 200
            shown = await answer.text()
        await until(is_counted, within=START_SECONDS)
    return shown + page
