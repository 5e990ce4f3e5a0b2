"""The probe of `tandem doctor`: each fault is named, and no text has a key."""

import asyncio
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tandem_kvstore.errors import StoreUnavailable, words_of
from tandem_kvstore.location import store_location
from tandem_kvstore.probe import probe_store
from tandem_kvstore.stores import open_store
from tandem_local.ports import free_port

from .servers import ACCESS_KEY, NAMESPACE, SECRET_KEY, Server, s3_location, versitygw

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


async def test_nothing_listens() -> None:
    port = free_port("127.0.0.1")
    location = store_location(f"http://127.0.0.1:{port}")
    result = await probe_store(location)
    assert (result.works, result.fix) == (
        False, "start the store, or open the network path to it"
    )  # fmt: skip
    assert result.detail == f"no connection to 127.0.0.1:{port}: Connection refused"


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("127.0.0.1", "no connection to the store: Connection refused"),
        # Top-level domain that no name server knows (RFC 2606).
        ("store.invalid", "the host name of the store is not known"),
    ],
)
async def test_a_request_says_why_the_store_cannot_be_reached(host: str, words: str) -> None:
    objects = open_store(store_location(f"http://{host}:{free_port('127.0.0.1')}"))
    with pytest.raises(StoreUnavailable) as failed:
        await objects.get("name", 1)
    await objects.close()
    assert words_of(failed.value) == words


async def test_tls_that_the_store_does_not_speak(server: Server) -> None:
    if server.location.endpoint.startswith("file:"):
        # A directory has no TLS: the same holds for the place that cannot be written.
        result = await probe_store(store_location("file:///proc/nowhere", NAMESPACE))
        assert not result.works
        return
    endpoint = server.location.endpoint.replace("http://", "https://")
    result = await probe_store(replace(server.location, endpoint=endpoint))
    assert result.detail.startswith("no TLS with 127.0.0.1")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="a skewed clock is made with gcc")
async def test_a_skewed_clock(tmp_path: Path, versitygw_program: None) -> None:
    source = tmp_path / "skew.c"
    source.write_text(SKEW)
    library = tmp_path / "skew.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    async with versitygw(tmp_path / "objects") as server:
        done = subprocess.run(
            [sys.executable, "-m", "tests.kvstore.probing", server.location.endpoint],
            env={"LD_PRELOAD": str(library), "PATH": "/usr/bin"},
            capture_output=True,
            text=True,
            check=True,
        )
    assert "its clock differs by -" in done.stdout, done.stdout
    assert SECRET_KEY not in done.stdout + done.stderr


SKEW = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
/* The wall clock is an hour ahead. */
int clock_gettime(clockid_t clock, struct timespec *value) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, value);
    if (clock == CLOCK_REALTIME) value->tv_sec += 3600;
    return result;
}
"""


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


async def doctor(*flags: str) -> tuple[int | None, str]:
    """Exit status and output of `tandem doctor`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tandem_cli", "doctor", *flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode()
