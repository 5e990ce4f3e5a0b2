"""Keys of a store appear nowhere in a fleet that uses it: every page and every log is searched."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from tandem_contract import metrics as names
from tandem_local.ports import free_port

from ...engine.engines import tiny_model
from ...kvstore.servers import ACCESS_KEY, NAMESPACE, SECRET_KEY, Server, versitygw
from ..real import envoy, envoy_settings, until

# An engine's start imports torch.
pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]
WRONG = "a-wrong-key-that-must-not-appear"
API_KEY = "an-api-key-that-must-not-appear"
PASSWORD = "a-password-that-must-not-appear"
START_SECONDS = 120.0
BODY = {"model": "m", "prompt": list(range(4, 104)), "max_tokens": 1}
PAGES = {
    "engine": ("/metrics", "/v1/models"),
    "sidecar": ("/state", "/metrics", "/requests/r-1"),
    "epp": ("/metrics", "/requests/r-1", "/debug/decisions", "/debug/pods"),
}


@dataclass
class Ports:
    """Of the processes."""

    engine: int
    sidecar: int
    admin: int
    grpc: int
    health: int
    metrics: int

    def urls(self) -> dict[str, str]:
        """Where `PAGES` are."""
        numbers = {"engine": self.engine, "sidecar": self.admin, "epp": self.metrics}
        return {name: f"http://127.0.0.1:{port}" for name, port in numbers.items()}


@asynccontextmanager
async def logging_to(
    log: Path, *command: str, environment: Mapping[str, str]
) -> AsyncIterator[None]:
    """A Python process whose output goes to a file."""
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", *command),
            env={**os.environ, **environment},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        yield
    finally:
        process.terminate()
        await process.wait()


def commands(
    ports: Ports, store: Server, access: Mapping[str, str], config: Path
) -> dict[str, tuple[str, ...]]:
    """What runs, by name."""
    storage = {"endpoint": store.location.endpoint, "kv_namespace": NAMESPACE, "chunk_tokens": 32}
    return {
        "engine": (
            *("tandem_engine.main", "--model", str(tiny_model()), "--served-model-name", "m"),
            *("--host", "127.0.0.1", "--port", str(ports.engine)),
            *("--num-gpu-blocks-override", "64"),
            *("--kv-storage-config", json.dumps({**storage, **access})),
        ),
        "sidecar": (
            *("tandem_sidecar.main", "--engine", f"http://127.0.0.1:{ports.engine}"),
            *("--listen", f"127.0.0.1:{ports.sidecar}", "--admin", f"127.0.0.1:{ports.admin}"),
            *("--prefill-allow", "127.0.0.1/32"),
        ),
        "epp": (
            *("tandem_epp", "--config", str(config), "--listen", f"127.0.0.1:{ports.grpc}"),
            *("--health", f"127.0.0.1:{ports.health}", "--metrics", f"127.0.0.1:{ports.metrics}"),
        ),
    }


def router_config(ports: Ports, store: Server) -> str:
    """The EPP's file: the store's keys and an API key come from the environment."""
    credentials = {"access_key": "${STORE_ACCESS_KEY}", "secret_key": "${STORE_SECRET_KEY}"}
    endpoint = {"endpoint": store.location.endpoint, "kv_namespace": NAMESPACE}
    backend = {"name": "d", "url": f"http://127.0.0.1:{ports.sidecar}", "role": "unified"}
    return json.dumps(
        {
            "disaggregated_serving": {
                "enabled": True,
                "default_external_storage": {**endpoint, "credentials": credentials},
            },
            "kv_cache_index": {"storage_offloading": {"enabled": True}},
            "backends": [{**backend, "credentials": {"api_key": API_KEY}}],
        }
    )


async def page(http: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    """Status and text; 0 while nothing answers."""
    try:
        async with http.get(url) as answer:
            return answer.status, await answer.text()
    except aiohttp.ClientError as err:
        return 0, str(err)


async def use(gateway: str, ports: Ports, counter: tuple[str, str]) -> dict[str, str]:
    """Send a request, wait until the engine has counted it, by a metric and a label; returns all
    pages."""
    urls = ports.urls()
    async with aiohttp.ClientSession() as http:

        async def is_answered() -> bool:
            url, headers = gateway + "/v1/completions", {"x-request-id": "r-1"}
            try:
                async with http.post(url, json=BODY, headers=headers) as answer:
                    await answer.read()
                    return answer.status == 200
            except aiohttp.ClientError:
                return False

        async def is_counted() -> bool:
            _, text = await page(http, urls["engine"] + "/metrics")
            name, label = counter
            lines = [x for x in text.splitlines() if x.startswith(name) and label in x]
            return any(float(line.rpartition(" ")[2]) > 0 for line in lines)

        async def is_up() -> bool:
            return (await page(http, urls["engine"] + "/health"))[0] == 200

        await until(is_up, within=START_SECONDS)
        await until(is_answered, within=START_SECONDS)
        await until(is_counted, within=START_SECONDS)
        read = {}
        for name, path in ((name, path) for name, paths in PAGES.items() for path in paths):

            async def is_read(name: str = name, path: str = path) -> bool:
                status, read[f"{name} {path}"] = await page(http, urls[name] + path)
                return status == 200

            await until(is_read, within=START_SECONDS)
        return read


async def doctor(store: Server, keys: Path) -> str:
    """What `tandem doctor` prints of the store."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tandem_cli", "doctor", "--storage", store.location.endpoint),
        *("--storage-namespace", NAMESPACE, "--storage-credentials", str(keys)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return (await process.communicate())[0].decode()


def write_keys(directory: Path, secret: str) -> None:
    directory.mkdir()
    (directory / "access_key").write_text(ACCESS_KEY)
    (directory / "secret_key").write_text(secret)


@pytest.mark.parametrize(
    ("secret", "is_chain", "counter", "words"),
    [
        pytest.param(
            *(SECRET_KEY, False, (names.ENGINE_TIER_STORED, 'tier="storage"')),
            "1 ok, 0 unknown, 0 warning, 0 broken",
            id="Secret",
        ),
        pytest.param(
            *(WRONG, True, (names.ENGINE_STORAGE_NOT_STORED, 'reason="denied"')),
            "refused the credentials",
            id="wrong-keys-of-the-default-chain",
        ),
    ],
)
async def test_keys_are_on_no_page_and_in_no_log(
    tmp_path: Path,
    versitygw_program: None,
    secret: str,
    is_chain: bool,
    counter: tuple[str, str],
    words: str,
) -> None:
    keys, ports = tmp_path / "keys", Ports(*(free_port("127.0.0.1") for _ in range(6)))
    write_keys(keys, secret)
    chain = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": secret}
    environment = {"STORE_ACCESS_KEY": ACCESS_KEY, "STORE_SECRET_KEY": secret}
    logs = {name: tmp_path / f"{name}.log" for name in PAGES}
    async with versitygw(tmp_path / "objects") as store, AsyncExitStack() as stack:
        access = {"protocol": "s3"} if is_chain else {"credentials_dir": str(keys)}
        config = tmp_path / "router.yaml"
        config.write_text(router_config(ports, store))
        run = commands(ports, store, access, config)
        environments = {"engine": chain if is_chain else {}, "sidecar": {}, "epp": environment}
        for name, command in run.items():
            started = logging_to(logs[name], *command, environment=environments[name])
            await stack.enter_async_context(started)
        settings = envoy_settings(ports.grpc)
        gateway = await stack.enter_async_context(envoy(tmp_path, settings))
        shown = await use(gateway, ports, counter)
        shown["doctor"] = await doctor(store, keys)
    assert words in shown["doctor"]
    shown |= {f"log of {name}": log.read_text() for name, log in logs.items()}
    shown |= {f"command of {name}": " ".join(command) for name, command in run.items()}
    for where, text in shown.items():
        assert text, where
        for key in (SECRET_KEY, WRONG, ACCESS_KEY, API_KEY):
            assert key not in text, where


async def test_a_password_in_the_stores_url_is_refused_and_quoted_by_nothing(
    tmp_path: Path,
) -> None:
    url, config = f"http://user:{PASSWORD}@127.0.0.1:9", tmp_path / "router.yaml"
    storage = {"default_external_storage": {"endpoint": url}}
    config.write_text(json.dumps({"disaggregated_serving": {"enabled": True, **storage}}))
    commands = [
        ("tandem_engine.main", "--model", str(tiny_model()), "--kv-storage-config",
         json.dumps({"endpoint": url})),
        ("tandem_epp", "--config", str(config)),
        ("tandem_cli", "doctor", "--storage", url),
    ]  # fmt: skip
    for command in commands:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", *command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        assert process.returncode == 2, command[0]
        assert b"user" in output, command[0]
        assert PASSWORD.encode() not in output, command[0]
