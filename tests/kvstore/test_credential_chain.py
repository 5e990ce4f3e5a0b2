"""Keys that no setting names: AWS's shared file, web identity and container; none is ever shown.

versitygw is the store. It knows no session tokens, so the services that give such keys are fakes.
"""

import logging
import ssl
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trustme
from aiohttp import web
from aiohttp.test_utils import TestServer

from tandem_kvstore.errors import LocationError, Reason, StoreDenied, StoreError
from tandem_kvstore.location import Protocol, StoreCredentials, StoreLocation
from tandem_kvstore.probe import probe_store
from tandem_kvstore.stores import open_store

from ..cluster import tools
from .gate import gate
from .kv import chain, client, group_specs, layer_groups
from .servers import ACCESS_KEY, SECRET_KEY, Server, versitygw
from .test_credentials import write_keys

pytestmark = pytest.mark.component

TOKEN = "a-session-token-that-must-appear-nowhere"
IDENTITY_TOKEN = "a-web-identity-that-must-appear-nowhere"
WRONG = "a-wrong-key-that-must-appear-nowhere"
HIDDEN = (ACCESS_KEY, SECRET_KEY, TOKEN, IDENTITY_TOKEN, WRONG)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No keys of the machine: a home directory without files, and no instance to ask."""
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "PROFILE"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    # The programs of these tests are kept below the real one.
    monkeypatch.setenv("TANDEM_CLUSTER_CACHE", str(tools.cache()))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")


@pytest.fixture
async def s3(tmp_path: Path, versitygw_program: None) -> AsyncIterator[Server]:
    async with versitygw(tmp_path / "objects") as server:
        yield server


def unstated(server: Server) -> StoreLocation:
    """The store, without keys in the settings."""
    return replace(server.location, credentials=None)


def write_profile(file: Path, secret: str, profile: str = "default", token: str = "") -> None:
    """As AWS's tools do: the file is replaced in one step."""
    file.parent.mkdir(exist_ok=True)
    fresh = file.with_suffix(".fresh")
    fresh.write_text(
        f"[other]\naws_access_key_id = OTHER\naws_secret_access_key = of-another-%profile\n"
        f"[{profile}]\naws_access_key_id = {ACCESS_KEY}\n"
        f"aws_secret_access_key = {secret}\n{token and 'aws_session_token = ' + token}\n"
    )
    fresh.rename(file)


async def test_the_shared_file_of_the_home_directory_is_used(s3: Server, tmp_path: Path) -> None:
    write_profile(tmp_path / ".aws" / "credentials", SECRET_KEY)
    assert (await probe_store(unstated(s3))).works


async def test_a_profile_of_a_named_file_is_used(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_profile(tmp_path / "keys", SECRET_KEY, "kv")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert (await probe_store(unstated(s3))).detail == "the store refused the credentials"
    monkeypatch.setenv("AWS_PROFILE", "kv")
    assert (await probe_store(unstated(s3))).works
    # The settings and the environment's own keys come before the file.
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert (await probe_store(s3.location)).works
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    assert (await probe_store(unstated(s3))).works


async def test_keys_of_the_shared_file_that_are_revoked_and_replaced_fail_no_load(
    tmp_path: Path, versitygw_program: None
) -> None:
    chunks, file = chain(1, 2), tmp_path / ".aws" / "credentials"
    write_profile(file, "the-first-secret-key")
    async with versitygw(tmp_path / "objects", secret="the-first-secret-key") as first:
        reader, behind, counts = client(unstated(first))
        await behind.put_all(chunks)
        port = int(first.location.endpoint.rpartition(":")[2])
    async with versitygw(tmp_path / "objects", port):
        with pytest.raises(StoreDenied):
            await behind.objects.get(chunks[0].key, 1 << 20)
        write_profile(file, SECRET_KEY)
        result = await reader.load(chunks, group_specs(), behind.deliver, context=0)
        assert (result.chunks, result.reason, counts.not_loaded) == (2, None, {})
        # A file that vanishes fails no request of a client that works.
        file.unlink()
        result = await reader.load(chunks, group_specs(), behind.deliver, context=0)
        assert (result.chunks, result.reason) == (2, None)
        await reader.close()


@pytest.mark.parametrize(
    ("content", "profile", "says"),
    [
        (None, "kv", "does not exist"),
        (f"[kv]\naws_access_key_id = {WRONG}\n", "kv", "lacks aws_access_key_id or"),
        (f"[kv]\naws_access_key_id = {WRONG}\n", "absent", "profile 'absent' of"),
        ("[kv]\nrole_arn = arn\nsource_profile = a\n", "kv", "a profile's role, SSO and"),
        (f"aws_secret_access_key = {WRONG}\n", "kv", "as a file of profiles"),
        (f"[kv]\n{WRONG}\n", "kv", "as a file of profiles"),
        (f"[kv]\n{WRONG}\nÿ", "kv", "as a file of profiles"),
    ],
    ids=["no-file", "no-secret", "no-profile", "role", "no-section", "no-field", "encoding"],
)
def test_a_shared_file_without_usable_keys_is_named_and_not_quoted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: str | None,
    profile: str,
    says: str,
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content.encode("latin-1"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", profile)
    with pytest.raises(LocationError, match=says) as caught:
        open_store(StoreLocation("http://127.0.0.1:1", protocol=Protocol.S3))
    assert str(file) in str(caught.value)
    assert_hidden(text_of(caught.value))


@asynccontextmanager
async def keys_by(
    name: str,
    location: StoreLocation,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    secret: str = SECRET_KEY,
    token: str = "",
) -> AsyncIterator[StoreLocation]:
    """Prepare the way `name` for these keys to `location`. versitygw takes no session token."""
    location = replace(location, credentials=None)
    if name == "secret":
        write_keys(directory / "secret", secret)
        (directory / "secret" / "session_token").write_text(token)
        credentials = StoreCredentials(directory=directory / "secret")
        yield replace(location, credentials=credentials)
    elif name == "environment":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        if token:
            monkeypatch.setenv("AWS_SESSION_TOKEN", token)
        yield location
    elif name == "profile":
        write_profile(directory / "keys", secret, "kv", token)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(directory / "keys"))
        monkeypatch.setenv("AWS_PROFILE", "kv")
        yield location
    else:
        (directory / "identity").write_text(IDENTITY_TOKEN)
        refuses = name.endswith("-refused")
        async with fake_giver_of_keys(directory, secret, token, refuses=refuses) as url:
            if name.startswith("container"):
                file = "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"
                monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/keys")
            else:
                file = "AWS_WEB_IDENTITY_TOKEN_FILE"
                monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/kv")
                monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
            monkeypatch.setenv(file, str(directory / "identity"))
            yield replace(location, ca_file=directory / "ca.pem")


@asynccontextmanager
async def fake_giver_of_keys(
    directory: Path, secret: str, token: str, *, refuses: bool
) -> AsyncIterator[str]:
    """AWS's security token service, and a container's endpoint for keys, over TLS."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(directory / "ca.pem")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)

    async def give(request: web.Request) -> web.Response:
        if refuses:
            return web.Response(status=403, text=f"no: {request.path_qs} {request.headers}")
        fields = {
            "AccessKeyId": ACCESS_KEY, "SecretAccessKey": secret,
            "Expiration": "2100-01-01T00:00:00Z",
        }  # fmt: skip
        if request.path == "/keys":
            assert request.headers["Authorization"] == IDENTITY_TOKEN
            return web.json_response({**fields, "Token": token})
        sent = request.path_qs + await request.text()
        assert IDENTITY_TOKEN in sent
        items = "".join(f"<{k}>{v}</{k}>" for k, v in {**fields, "SessionToken": token}.items())
        name = "AssumeRoleWithWebIdentity"
        body = f"<Credentials>{items}</Credentials>"
        text = f"<{name}Response><{name}Result>{body}</{name}Result></{name}Response>"
        return web.Response(text=text, content_type="text/xml")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", give)
    server = TestServer(app, scheme="https", host="localhost")
    await server.start_server(ssl=context, access_log=None)
    try:
        yield f"https://localhost:{server.port}"
    finally:
        await server.close()


WAYS = ["secret", "environment", "profile", "web-identity", "container"]


@pytest.mark.parametrize("name", WAYS)
async def test_each_way_to_keys_works(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async with keys_by(name, s3.location, tmp_path, monkeypatch) as location:
        assert (await probe_store(location)).works


@pytest.mark.parametrize("name", [*WAYS, "web-identity-refused", "container-refused"])
async def test_keys_that_are_refused_are_shown_nowhere(
    s3: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    caplog.set_level(logging.DEBUG)
    (chunk,) = chain(1, 1)
    tokens: set[str | None] = set()

    def note_token(request: web.Request) -> None:
        tokens.add(request.headers.get("x-amz-security-token"))

    keys = {"secret": WRONG, "token": TOKEN}
    async with (
        gate(s3.location, note_token) as front,
        keys_by(name, front.location, tmp_path, monkeypatch, **keys) as location,
    ):
        guarded, behind, counts = client(location)
        assert not await guarded.store(chunk, layer_groups(chunk))
        result = await guarded.load([chunk], group_specs(), behind.deliver, context=0)
        with pytest.raises(StoreError) as caught:
            await behind.objects.get(chunk.key, 1 << 20)
        probed = await probe_store(location)
        await guarded.close()
    assert not probed.works
    if not name.endswith("-refused"):
        assert TOKEN in tokens
        assert result.reason is Reason.DENIED
        assert "the store refused the credentials" in caplog.text
    shown = [caplog.text, repr(counts), repr(probed), repr(location), text_of(caught.value)]
    shown += [repr(value) for value in (behind.objects, vars(behind.objects), result)]
    assert_hidden("\n".join(shown))


def text_of(error: BaseException) -> str:
    """What a log shows of an error."""
    return repr(error) + "".join(traceback.format_exception(error))


def assert_hidden(shown: str) -> None:
    for value in HIDDEN:
        assert value not in shown, f"{value} is shown"
