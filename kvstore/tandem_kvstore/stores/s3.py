"""An S3 store through obstore: SigV4, multipart uploads, path or virtual-host style.

Payloads are not signed: KV has its own checksum, and hashing each byte once more would take longer
than sending it. obstore does not retry: the client has a deadline, and the circuit breaker counts
each failure.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar, cast

import obstore
from obstore import exceptions
from obstore import store as obstores

from ..errors import (
    LocationError,
    ObjectEmpty,
    ObjectExists,
    ObjectMissing,
    ObjectTooLarge,
    StoreDenied,
    StoreError,
    StoreExpired,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    StoreUnsupported,
)
from ..format.tensors import Buffer
from ..location import Secret, StoreLocation
from .base import ObjectInfo, TaggedObject
from .s3_keys import Keys, key_files

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Config

T = TypeVar("T")

_MULTIPART: Final = 64 << 20
"""Bytes above which an upload has several parts. With one part it takes one request, not three."""
_FULL_CODES: Final = (
    "QuotaExceeded",
    "InsufficientStorage",
    "StorageFull",
    "EntityTooLarge",
)
_DENIED_CODES: Final = (
    "Expired",
    "InvalidToken",
    "TokenRefreshRequired",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "RequestTimeTooSkewed",
    "XAdminUserNotFound",
)
"""Prefixes of S3 error codes, which some stores send with status 400. versitygw sends the last one,
with status 404, for an unknown access key."""
_STATUS: Final = re.compile(r"Server returned non-2xx status code: (\d{3})")
"""The status in the text of an obstore error. Elsewhere in the text such digits may belong to a
duration, a port or a key."""
_SECONDS_OF_CREDENTIALS: Final = 1.0
"""Least seconds between two checks of the credentials' files."""


class S3Store:
    """One namespace of a bucket. For one event loop."""

    def __init__(self, location: StoreLocation) -> None:
        self._location = location
        self._prefix = f"{location.prefix}/" if location.prefix else ""
        self._authority = _authority(location.ca_file)
        self._key_files = key_files(location.credentials, os.environ)
        self._stamp: object = None
        self._next_look = 0.0
        self._client = self._new_client()

    async def get(self, name: str, limit: int, *, is_cut: bool = False) -> Buffer:
        end = limit if is_cut else limit + 1
        # A range although all of it is wanted: one call of the library instead of two, of which
        # each costs a turn of the event loop. Of an object that is too large, `limit` + 1 bytes
        # are read.
        try:
            data = await self._send(
                f"GET {name}",
                lambda client: obstore.get_range_async(
                    client, self._prefix + name, start=0, end=end
                ),
            )
        except ObjectEmpty:
            return b""
        if len(data) > limit:
            raise _too_large(name, limit)
        return memoryview(data)

    async def get_tagged(self, name: str, limit: int) -> TaggedObject:
        async def get(client: obstores.S3Store) -> TaggedObject:
            answer = await obstore.get_async(client, self._prefix + name)
            if answer.meta["size"] > limit:
                raise _too_large(name, limit)
            data = await answer.bytes_async()
            return TaggedObject(memoryview(data), answer.meta["e_tag"])

        return await self._send(f"GET {name}", get)

    async def put(self, name: str, parts: Sequence[Buffer]) -> None:
        await self._put(name, parts, "overwrite")

    async def put_if(self, name: str, parts: Sequence[Buffer], tag: str | None) -> None:
        await self._put(name, parts, "create" if tag is None else {"e_tag": tag})

    async def delete(self, name: str) -> None:
        with suppress(ObjectMissing):
            await self._send(
                f"DELETE {name}",
                lambda client: obstore.delete_async(client, self._prefix + name),
            )

    async def info(self, name: str) -> ObjectInfo:
        meta = await self._send(
            f"HEAD {name}", lambda client: obstore.head_async(client, self._prefix + name)
        )
        return ObjectInfo(name, meta["size"], meta["last_modified"].timestamp())

    async def scan(self) -> AsyncIterator[ObjectInfo]:
        with _store_errors("LIST"):
            async for batch in obstore.list(self._store(), self._prefix or None):
                for meta in batch:
                    name = meta["path"].removeprefix(self._prefix)
                    # Skip other namespaces below this one.
                    if "/" not in name:
                        yield ObjectInfo(name, meta["size"], meta["last_modified"].timestamp())

    async def close(self) -> None:
        """Nothing: obstore closes its connections when Python deletes the client."""

    async def _put(self, name: str, parts: Sequence[Buffer], mode: "obstore.PutMode") -> None:
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        await self._send(
            f"PUT {name}",
            lambda client: obstore.put_async(
                client,
                self._prefix + name,
                cast(bytes, body),
                mode=mode,
                # S3 has no conditional upload of several parts.
                use_multipart=len(body) > _MULTIPART and mode == "overwrite",
                chunk_size=_MULTIPART // 4,
            ),
        )

    async def _send(self, what: str, request: Callable[[obstores.S3Store], Awaitable[T]]) -> T:
        """Send a request. If it is denied and the credentials' files have changed, send it
        again."""
        client = self._store()
        try:
            with _store_errors(what):
                return await request(client)
        except StoreDenied:
            # Keys may be revoked in the second before the next check of the files.
            self._next_look = 0.0
            if (fresh := self._store()) is client:
                raise
        with _store_errors(what):
            return await request(fresh)

    def _store(self) -> obstores.S3Store:
        """The client; a new one if the credentials' files have changed."""
        now = asyncio.get_running_loop().time()
        if now >= self._next_look and self._key_files is not None:
            self._next_look = now + _SECONDS_OF_CREDENTIALS
            if self._key_files.stamp() != self._stamp:
                # While the files are being replaced, go on with the old keys.
                with suppress(LocationError):
                    self._client = self._new_client()
        return self._client

    def _new_client(self) -> obstores.S3Store:
        location = self._location
        config: S3Config = {
            "endpoint": location.host_url,
            # obstore reads unset options from the environment, and prefers this one.
            "aws_endpoint_url_s3": location.host_url,
            "region": location.region,
            "virtual_hosted_style_request": location.virtual_host_style,
            "unsigned_payload": True,
            "conditional_put": "etag",
            "disable_bulk_delete": True,
        }
        provider = None
        if (keys := self._keys()) is not None:
            config["skip_signature"] = False
            # A provider, because `config` cannot say "no session token": obstore would send the
            # environment's, or for an empty one an empty header, which R2 and AWS refuse.
            provider = keys.credential
        options: ClientConfig = {
            "allow_http": location.endpoint.startswith("http://"),
            "timeout": timedelta(seconds=location.timeout),
            "connect_timeout": timedelta(seconds=location.connect_timeout),
            **self._authority,
        }
        try:
            return obstores.S3Store(
                location.bucket,
                config=config,
                client_options=options,
                retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
                credential_provider=provider,
            )
        except (exceptions.BaseError, ValueError, OSError):
            # Not quoted or chained: see `_store_errors`.
            raise LocationError(
                f"S3 store {location.endpoint}: obstore refuses its settings, or a variable AWS_… "
                "of the environment"
            ) from None

    def _keys(self) -> Keys | None:
        """The keys to sign with; None: obstore finds them."""
        if self._key_files is not None:
            # The stamp before the keys: the next check then notices a change in between.
            stamp = self._key_files.stamp()
            keys = self._key_files.read()
            self._stamp = stamp
            return keys
        credentials = self._location.credentials
        if credentials is None or not credentials.access_key:
            return None
        return Keys(credentials.access_key, credentials.secret_key, Secret(""))


def _too_large(name: str, limit: int) -> ObjectTooLarge:
    return ObjectTooLarge(f"{name} has more than {limit} bytes")


def _authority(file: Path | None) -> "ClientConfig":
    if file is None:
        return {}
    try:
        return {"root_certificate": file.read_bytes()}
    except OSError as err:
        raise LocationError(f"ca_file {file}: {err.strerror}") from err


@contextmanager
def _store_errors(what: str) -> Iterator[None]:
    """Turn obstore's errors into this package's. Their texts quote URLs and answers, so messages do
    not have them, and the errors are not chained: a traceback would show them."""
    try:
        yield
    except StoreError:
        raise
    except FileNotFoundError as err:
        if _is_denial(text := str(err)):
            raise _denial(what, text) from None
        raise ObjectMissing(f"{what}: no such object or bucket") from None
    except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
        raise ObjectExists(f"{what}: another object is there") from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as err:
        raise _denial(what, str(err)) from None
    except exceptions.NotSupportedError:
        raise StoreUnsupported(f"{what}: the store does not support it") from None
    except (exceptions.BaseError, ValueError, OSError) as err:
        raise error_by_text(what, str(err)) from None


def _is_denial(text: str) -> bool:
    return any(f"<Code>{code}" in text for code in _DENIED_CODES)


def _denial(what: str, text: str) -> StoreDenied:
    if "<Code>Expired" in text:
        return StoreExpired(f"{what}: the credentials have expired, and must be rotated")
    if "<Code>RequestTimeTooSkewed" in text:
        return StoreDenied(f"{what}: the store refused the signature's time: set both clocks")
    return StoreDenied(f"{what}: the store refused the credentials")


def error_by_text(what: str, text: str) -> StoreError:
    """An error for which obstore has no class, by the store's answer in its text."""
    answer = _STATUS.search(text)
    status = int(answer[1]) if answer else None
    if status == 507 or any(code in text for code in _FULL_CODES):
        return StoreFull(f"{what}: the store is full")
    # A listing that is denied has no class of its own.
    if status in (401, 403) or _is_denial(text):
        return _denial(what, text)
    if status in (405, 501):
        return StoreUnsupported(f"{what}: the store does not support it")
    if status == 416:
        return ObjectEmpty(f"{what}: the object is empty")
    if "timed out" in text or "TimedOut" in text:
        return StoreTimeout(f"{what}: no answer in time")
    return StoreUnavailable(f"{what}: the store is unreachable or failed")
