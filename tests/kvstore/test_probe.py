"""The probe of `tandem doctor`: each fault is named, and no text has a key."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from tandem_contract.commandline import HostPort
from tandem_doctor.findings import Severity
from tandem_doctor.storage_use import storage_finding
from tandem_kvstore import probe
from tandem_kvstore.errors import StoreFull, StoreUnavailable, message_of
from tandem_kvstore.location import store_location
from tandem_kvstore.probe import probe_store
from tandem_kvstore.stores import open_store
from tandem_local.ports import free_port

from ..chaos.toxiproxy import toxiproxy
from .gate import error, gate
from .servers import (
    ACCESS_KEY,
    NAMESPACE,
    SECRET_KEY,
    Server,
    s3_location,
    small_disk,
    store_in_this_process,
    tandem_store,
    versitygw,
)

pytestmark = pytest.mark.component


async def test_a_store_that_works(server: Server) -> None:
    result = await probe_store(server.location)
    assert (result.works, result.is_limited, result.fix) == (True, False, "")
    # Nothing stays but what the store itself keeps.
    assert not [file for file in server.directory.glob("*") if file.name.startswith("probe")]


async def test_wrong_keys_and_a_missing_bucket(tmp_path: Path, versitygw_program: None) -> None:
    async with versitygw(tmp_path) as server:
        wrong = await probe_store(s3_location(server.location.endpoint, secret="the-wrong-secret"))
        assert "refused the credentials" in wrong.detail
        missing = await probe_store(replace(server.location, namespace="no-such-bucket/kv"))
        assert missing.detail == "the bucket 'no-such-bucket' does not exist"
    for result in (wrong, missing):
        assert not result.works
        assert "secret" not in repr(result).replace("Secret", "")


@pytest.mark.parametrize(
    ("denied", "detail", "right"),
    [
        ("write", "the credentials may read, but not write", "s3:PutObject"),
        ("read", "the credentials may write, but not read", "s3:GetObject"),
        ("list", "the credentials may write and read, but not list", "s3:ListBucket"),
        ("delete", "the credentials may write and read and list, but not delete",
         "s3:DeleteObject"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("protocol", ["http", "s3"])
async def test_a_right_that_is_missing_is_named(
    tmp_path: Path, versitygw_program: None, protocol: str, denied: str, detail: str, right: str
) -> None:
    rights = {"PUT": "write", "DELETE": "delete"}

    def refuse(request: web.Request) -> web.Response | None:
        read = "list" if "list" in request.query_string else "read"
        is_denied = rights.get(request.method, read) == denied
        return error(403, "AccessDenied") if is_denied else None

    start = store_in_this_process if protocol == "http" else versitygw
    async with start(tmp_path) as server, gate(server.location, refuse) as front:
        result = await probe_store(front.location)
    assert (result.works, result.detail) == (False, detail)
    assert right in result.fix


async def test_nothing_listens() -> None:
    port = free_port("127.0.0.1")
    location = store_location(f"http://127.0.0.1:{port}")
    result = await probe_store(location)
    assert (result.works, result.fix) == (
        False, "start the store, or open the network path to it"
    )  # fmt: skip
    assert result.detail == f"no connection to 127.0.0.1:{port}: Connection refused"


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("127.0.0.1", "no connection to the store: Connection refused"),
        # Top-level domain that no name server knows (RFC 2606).
        ("store.invalid", "the host name of the store is not known"),
    ],
)
async def test_a_request_says_why_the_store_cannot_be_reached(host: str, message: str) -> None:
    objects = open_store(store_location(f"http://{host}:{free_port('127.0.0.1')}"))
    with pytest.raises(StoreUnavailable) as failed:
        await objects.get("name", 1)
    await objects.close()
    assert message_of(failed.value) == message


async def test_tls_that_the_store_does_not_speak(server: Server) -> None:
    if server.location.endpoint.startswith("file:"):
        # A directory has no TLS: the same holds for the place that cannot be written.
        result = await probe_store(store_location("file:///proc/nowhere", NAMESPACE))
        assert not result.works
        return
    endpoint = server.location.endpoint.replace("http://", "https://")
    result = await probe_store(replace(server.location, endpoint=endpoint))
    assert result.detail.startswith("no TLS with 127.0.0.1")


@pytest.mark.parametrize("protocol", ["http", "s3"])
async def test_tandem_doctor_names_a_full_disk(
    tmp_path: Path, versitygw_program: None, protocol: str
) -> None:
    start = tandem_store if protocol == "http" else versitygw
    within = small_disk(tmp_path / "objects")
    async with start(tmp_path / "objects", within=within) as server:
        objects = open_store(server.location)
        assert (await storage_finding(server.location)).severity is not Severity.BROKEN
        # Down to the last page: an object of one byte takes one.
        for size in (1 << 16, 1 << 12, 1):
            with suppress(StoreFull):
                for number in range(100):
                    await objects.put(f"filling-{size}-{number}", [bytes(size)])
                pytest.fail("a disk of 400 KiB took more than that")
        finding = await storage_finding(server.location)
        assert (finding.severity, finding.detail) == (
            Severity.BROKEN,
            "the store takes no more bytes",
        )
        assert finding.fix.startswith("give it more space")
        await objects.close()


@pytest.mark.parametrize("protocol", ["http", "s3"])
async def test_tandem_doctor_names_a_half_open_store(
    tmp_path: Path,
    versitygw_program: None,
    toxiproxy_program: None,
    monkeypatch: pytest.MonkeyPatch,
    protocol: str,
) -> None:
    # The network is silent for good: more time would change nothing.
    monkeypatch.setattr(probe, "_SECONDS", 2.0)
    start = tandem_store if protocol == "http" else versitygw
    async with start(tmp_path) as server, toxiproxy() as proxies:
        # The kernel accepts its connections, and no process reads from them.
        with socket.create_server(("127.0.0.1", 0)) as silent:
            await assert_half_open(server, f"127.0.0.1:{silent.getsockname()[1]}")
        host, _, port = server.location.endpoint.removeprefix("http://").rpartition(":")
        address = await proxies.before("store", HostPort(host, int(port)))
        # The first 40 bytes of an answer come, the next ones a minute later.
        await proxies.poison("store", "slicer", average_size=40, delay=60_000_000)
        try:
            await assert_half_open(server, str(address))
        finally:
            await proxies.cure("store", "slicer")


async def assert_half_open(server: Server, address: str) -> None:
    """`tandem doctor` says so of the store behind `address`."""
    finding = await storage_finding(replace(server.location, endpoint=f"http://{address}"))
    assert (finding.severity, finding.detail) == (
        Severity.BROKEN,
        f"http://{address} accepts connections, but does not answer within 2 s",
    )
    assert "half-open" in finding.fix


async def test_tandem_doctor_checks_a_store_and_shows_no_key(
    tmp_path: Path, versitygw_program: None
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "access_key").write_text(ACCESS_KEY)
    (keys / "secret_key").write_text(SECRET_KEY)
    async with versitygw(tmp_path / "objects") as server:
        flags = ("--storage", server.location.endpoint, "--storage-credentials", str(keys), "--all")
        right = await doctor(*flags, "--storage-namespace", NAMESPACE)
        wrong = await doctor(*flags, "--storage-namespace", "no-such-bucket/kv")
    assert right[0] == 0
    assert "reads, writes and lists" in right[1]
    assert wrong[0] == 1
    assert "the bucket 'no-such-bucket' does not exist" in wrong[1]
    assert "fix: create it" in wrong[1]
    assert SECRET_KEY not in right[1] + wrong[1]
    assert ACCESS_KEY not in right[1] + wrong[1]


async def test_tandem_doctor_checks_the_stores_of_a_routers_file_with_its_credentials(
    tmp_path: Path, versitygw_program: None
) -> None:
    def storage(endpoint: str, variable: str) -> dict[str, object]:
        credentials = {"access_key": "${STORE_KEY}", "secret_key": f"${{{variable}}}"}
        return {"endpoint": endpoint, "kv_namespace": NAMESPACE, "credentials": credentials}

    keys = {"STORE_KEY": ACCESS_KEY, "STORE_SECRET": SECRET_KEY, "WRONG_SECRET": "another-key"}
    async with versitygw(tmp_path / "objects") as server:
        endpoint = server.location.endpoint
        default, own = storage(endpoint, "STORE_SECRET"), storage(endpoint, "WRONG_SECRET")
        backends = [
            {"name": "p", "url": "http://10.0.0.1", "external_storage": default},
            {"name": "d", "url": "http://10.0.0.2", "external_storage": own},
        ]
        serving = {"default_external_storage": default}
        file = tmp_path / "router.yaml"
        file.write_text(json.dumps({"disaggregated_serving": serving, "backends": backends}))
        status, output = await doctor("--router-file", str(file), "--all", **keys)
    # A store that the file names twice is checked once.
    assert (status, output.count("reads, writes and lists")) == (1, 1)
    assert output.count("refused the credentials") == 1
    assert not any(key in output for key in keys.values())


async def test_a_routers_file_without_a_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "router.yaml").write_text("{backends: []}")
    status, output = await doctor("--router-file", str(tmp_path / "router.yaml"))
    assert (status, "names no external_storage" in output) == (2, True)


async def doctor(*flags: str, **environment: str) -> tuple[int | None, str]:
    """Exit status and output of `tandem doctor`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tandem_cli", "doctor", *flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | environment,
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode()
