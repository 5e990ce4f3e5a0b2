"""S3: buckets in the host's name, credentials that change or expire, and a disk that is full."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from tandem_kvstore.errors import LocationError, Reason, StoreDenied, StoreExpired, StoreFull
from tandem_kvstore.location import StoreCredentials
from tandem_kvstore.probe import probe_store
from tandem_kvstore.stores import open_store

from .gate import error, gate
from .kv import chain, client, engine, group_specs, layer_groups
from .servers import ACCESS_KEY, SECRET_KEY, Server, small_disk, versitygw
from .test_credentials import write_keys

pytestmark = pytest.mark.component


@pytest.fixture
async def s3(tmp_path: Path, versitygw_program: None) -> AsyncIterator[Server]:
    async with versitygw(tmp_path / "objects", options=("--virtual-domain", "s3.test")) as server:
        yield server


async def test_a_bucket_in_the_hosts_name(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    # versitygw takes requests as a proxy gets them, so no name has to be resolved.
    monkeypatch.setenv("HTTP_PROXY", s3.location.endpoint)
    location = replace(s3.location, endpoint="http://s3.test", virtual_host_style=True)
    (chunk,), writer = chain(1, 1), engine(location)
    await writer.put_all([chunk])
    assert (s3.directory / chunk.key).exists()
    assert (await writer.chunks.fetch([chunk], group_specs(), writer.deliver)).chunks == 1
    assert (await probe_store(location)).works
    monkeypatch.delenv("HTTP_PROXY")
    result = await probe_store(location)
    assert result.detail == "the name tandem-test.s3.test is not known"


async def test_the_environment_changes_neither_the_endpoint_nor_the_keys_of_a_secret(
    s3: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-other-keys")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert (await probe_store(s3.location)).works


async def test_a_variable_that_obstore_refuses_is_a_wrong_setting(
    s3: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_S3_EXPRESS", "true")
    with pytest.raises(LocationError, match="a variable AWS_"):
        open_store(s3.location)


async def test_keys_without_a_session_token_send_no_header_for_one(
    s3: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R2 and AWS refuse an empty one."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-other-keys")

    def refuse(request: web.Request) -> web.Response | None:
        has_token = "x-amz-security-token" in request.headers
        return error(400, "InvalidArgument") if has_token else None

    async with gate(s3.location, refuse) as between:
        assert (await probe_store(between.location)).works


async def test_keys_of_the_environment_are_used_without_a_secret(
    s3: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = replace(s3.location, credentials=None)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    assert (await probe_store(location)).detail == "the store refused the credentials"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    assert (await probe_store(location)).works


async def test_keys_of_the_instance_are_used_without_a_secret(
    s3: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)

    def fake_metadata(request: web.Request) -> web.Response:
        if request.method == "PUT":
            return web.Response(text="token")
        if request.path.endswith("/"):
            return web.Response(text="role")
        keys = {"AccessKeyId": ACCESS_KEY, "SecretAccessKey": SECRET_KEY, "Token": ""}
        times = {"Expiration": "2100-01-01T00:00:00Z", "LastUpdated": "2026-01-01T00:00:00Z"}
        return web.json_response({"Code": "Success", "Type": "AWS-HMAC", **keys, **times})

    async with gate(s3.location, fake_metadata) as fake:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", fake.location.endpoint)
        assert (await probe_store(replace(s3.location, credentials=None))).works


async def test_keys_that_are_revoked_and_replaced_at_once_fail_no_load(
    tmp_path: Path, versitygw_program: None
) -> None:
    chunks, secret = chain(1, 2), tmp_path / "secret"
    write_keys(secret, "the-first-secret-key")
    credentials = StoreCredentials(directory=secret)
    async with versitygw(tmp_path / "objects", secret="the-first-secret-key") as first:
        location = replace(first.location, credentials=credentials)
        reader, behind, counts = client(location)
        await behind.put_all(chunks)
        port = int(location.endpoint.rpartition(":")[2])
    async with versitygw(tmp_path / "objects", port):
        with pytest.raises(StoreDenied):
            await behind.objects.get(chunks[0].key, 1 << 20)
        # Within the second in which the files are not looked at again.
        write_keys(secret, SECRET_KEY)
        result = await reader.load(chunks, group_specs(), behind.deliver, context=0)
        assert (result.chunks, result.reason) == (2, None)
        assert counts.not_loaded == {}
        await reader.close()


async def test_credentials_that_have_expired_are_named(
    s3: Server, caplog: pytest.LogCaptureFixture
) -> None:
    # versitygw knows no session tokens: the answer is the one that AWS documents.
    async with gate(s3.location, lambda _: error(400, "ExpiredToken")) as front:
        with pytest.raises(StoreExpired):
            await open_store(front.location).put("object", [b"data"])
        result = await probe_store(front.location)
        assert result.detail == "the credentials have expired"
        writer, _, counts = client(front.location)
        (chunk,) = chain(1, 1)
        assert not await writer.store(chunk, layer_groups(chunk))
        assert counts.not_stored == {Reason.DENIED: 1}
        assert "the credentials have expired" in caplog.text
        await writer.close()
    assert SECRET_KEY not in caplog.text


async def test_a_disk_that_is_full_can_still_be_read(
    tmp_path: Path, versitygw_program: None
) -> None:
    directory, chunks = tmp_path / "objects", chain(1, 60)
    own = small_disk(directory)
    async with versitygw(directory, within=own) as server:
        writer, behind, counts = client(server.location)
        for chunk in chunks:
            if not await writer.store(chunk, layer_groups(chunk)):
                break
        assert counts.not_stored == {Reason.FULL: 1}
        assert counts.stored > 5
        with pytest.raises(StoreFull):
            await behind.objects.put("more", [bytes(1 << 20)])
        assert writer.guard.breaker.allows
        stored = chunks[: counts.stored]
        result = await writer.load(stored, group_specs(), behind.deliver, context=0)
        assert (result.chunks, result.reason) == (len(stored), None)
        await writer.close()
