"""API keys of clients: real Envoy with the file that `routing.api_keys` keeps up to date."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from tandem_contract.headers import CLIENT
from tandem_local.ports import free_port
from tandem_operator.routing.api_keys import filter_config
from tandem_operator.routing.envoy.bootstrap import READY, EnvoySettings

from ..contract.test_api_keys import WITHOUT_KEY
from ..epp.real import Backend, envoy, process, serving, until

pytestmark = pytest.mark.component

HOST = "127.0.0.1"
PROGRAM = (sys.executable, "-m", "tandem_operator.routing.api_keys")


class Secret:
    """A mounted Secret, which changes as the kubelet changes it: by moving a link."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._generation = 0
        directory.mkdir()

    def write(self, **keys: str) -> None:
        self._generation += 1
        data = self.directory / f"..{self._generation}"
        data.mkdir()
        for client, key in keys.items():
            (data / client).write_text(key)
        link = self.directory / "..new"
        link.symlink_to(data.name)
        os.replace(link, self.directory / "..data")
        for file in self.directory.iterdir():
            if not file.name.startswith(".") and file.name not in keys:
                file.unlink()
        for client in keys:
            if not (self.directory / client).is_symlink():
                (self.directory / client).symlink_to(Path("..data") / client)


class Clients:
    """Clients of a running Envoy that asks for keys."""

    def __init__(self, url: str, secret: Secret, backend: Backend) -> None:
        self.url, self.secret, self.backend = url, secret, backend
        self.session: aiohttp.ClientSession

    async def status(self, path: str = "/v1/completions", **headers: str) -> int:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(self.url + path, data=b"{}", headers=sent) as answer:
            await answer.read()
            return answer.status


@pytest.fixture
async def clients(tmp_path: Path) -> AsyncIterator[Clients]:
    secret = Secret(tmp_path / "secret")
    secret.write(alice="key-a\n", bob="key-b")
    (tmp_path / "filter").mkdir()
    file = tmp_path / "filter" / "keys.json"
    backend, health = Backend("decode-1"), free_port(HOST)
    async with AsyncExitStack() as parts:
        await parts.enter_async_context(serving(backend))
        await parts.enter_async_context(process(*PROGRAM, secret.directory, file))

        async def written() -> bool:
            return file.exists()

        await until(written)
        settings = EnvoySettings(
            epp_address="no-such-epp.invalid",
            fallback=(f"{HOST}:{backend.port}",),
            listen_address=HOST,
            listen_port=free_port(HOST),
            admin_port=free_port(HOST),
            health_port=health,
            api_key_file=str(file),
        )
        running = Clients(
            await parts.enter_async_context(envoy(tmp_path, settings)), secret, backend
        )
        running.session = await parts.enter_async_context(aiohttp.ClientSession())
        async with running.session.get(f"http://{HOST}:{health}{READY}") as answer:
            assert answer.status == 200
        yield running


async def test_only_clients_with_a_key_are_served(clients: Clients) -> None:
    assert await clients.status(authorization="Bearer key-a") == 200
    assert await clients.status(x_api_key="key-b") == 200
    for headers in WITHOUT_KEY:
        assert await clients.status(**headers) == 401, headers
    assert await clients.status("/v1/models") == 401
    assert len(clients.backend.received) == 2


async def test_a_refusal_has_the_form_of_its_api(clients: Clients) -> None:
    for path, kind in (
        ("/v1/completions", "AuthenticationError"),
        ("/v1/messages", "authentication_error"),
    ):
        async with clients.session.post(clients.url + path, data=b"{}") as answer:
            assert (answer.status, answer.content_type) == (401, "application/json")
            error = (await answer.json())["error"]
        assert error["type"] == kind
        assert error["message"]


async def test_the_engine_does_not_see_the_key(clients: Clients) -> None:
    await clients.status(authorization="Bearer key-a")
    await clients.status(x_api_key="key-b")
    for request in clients.backend.received:
        assert not {"authorization", "x-api-key"} & set(request.headers)


async def test_the_epp_and_engines_get_the_clients_name(clients: Clients) -> None:
    for headers in ({}, {"x_tandem_client": "bob"}):
        await clients.status(authorization="Bearer key-a", **headers)
        assert clients.backend.received.pop().headers[CLIENT] == "alice"


async def test_without_the_epp_that_tenants_need_no_request_is_served(tmp_path: Path) -> None:
    backend = Backend("decode-1")
    settings = EnvoySettings(
        epp_address="no-such-epp.invalid",
        fallback=(f"{HOST}:{backend.port}",),
        listen_address=HOST,
        listen_port=free_port(HOST),
        admin_port=free_port(HOST),
        needs_epp=True,
    )
    async with (
        serving(backend),
        envoy(tmp_path, settings) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", data=b"{}") as answer,
    ):
        assert answer.status == 503
    assert not backend.received


async def test_keys_are_rotated_without_a_restart(clients: Clients) -> None:
    clients.secret.write(alice="key-a", bob="key-new")

    async def changed() -> bool:
        return await clients.status(x_api_key="key-new") == 200

    await until(changed)
    assert await clients.status(x_api_key="key-b") == 401
    assert await clients.status(x_api_key="key-a") == 200
    clients.secret.write()

    async def none_left() -> bool:
        return await clients.status(x_api_key="key-new") == 401

    await until(none_left)
    assert await clients.status(x_api_key="key-a") == 401


def test_one_key_of_two_clients_counts_for_the_first() -> None:
    config = filter_config({"b": "same", "a": "same"})["resources"][0]["typed_config"]
    assert config["credentials"] == [{"key": "same", "client": "a"}]


async def test_the_program_ends_on_sigterm(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    file = tmp_path / "keys.json"
    async with process(*PROGRAM, tmp_path / "secret", file) as started:

        async def written() -> bool:
            return file.exists()

        await until(written)
        assert file.stat().st_mode & 0o077 == 0
        started.send_signal(signal.SIGTERM)
        assert await started.wait() == 0


async def test_keys_that_cannot_be_read_are_reported_once(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "a").symlink_to("a")  # unreadable, for root, too
    file = tmp_path / "keys.json"
    async with process(*PROGRAM, secret, file, stderr=asyncio.subprocess.PIPE) as started:
        assert started.stderr is not None
        line = await started.stderr.readline()
        assert b"API keys not read" in line
        assert str(secret / "a").encode() in line
        (secret / "a").unlink()
        (secret / "b").write_text("key-b")
        # The next line says how many keys there are now: neither the problem again nor a traceback.
        assert b"1 clients have an API key" in await started.stderr.readline()
        started.send_signal(signal.SIGTERM)
        assert await started.wait() == 0
