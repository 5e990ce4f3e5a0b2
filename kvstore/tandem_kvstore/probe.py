"""Tests a store with a small object, and says what is wrong with it and how to fix that.

For `tandem doctor`. No text contains a key.
"""

import asyncio
import os
import socket
import ssl
import uuid
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from .errors import (
    LocationError,
    ObjectExists,
    ObjectMissing,
    StoreDenied,
    StoreError,
    StoreExpired,
    StoreFull,
    StoreUnavailable,
    StoreUnsupported,
)
from .location import Protocol, StoreLocation
from .stores import ObjectStore, open_store

_SKEW: Final = 300.0
"""Seconds of clock difference that are reported. S3 stores refuse signatures 900 s off."""
_SECONDS: Final = 10.0
"""Seconds for all requests of a probe."""
_CONNECT_SECONDS: Final = 5.0
"""Seconds for the connection, or the request for the store's time, that explains a failure."""
_PAYLOAD: Final = b"tandem doctor"
_RIGHTS: Final = {
    "write": "s3:PutObject", "read": "s3:GetObject", "list": "s3:ListBucket",
    "delete": "s3:DeleteObject",
}  # fmt: skip
"""What the probe does, in this order, and its name in S3's policies."""
_VALIDITY_FIX: Final = "renew the store's certificate, or set this machine's clock"
_NAME_FIX: Final = "use a host name that is in the certificate, or have one issued for this name"
_CERTIFICATE_FIXES: Final = {9: _VALIDITY_FIX, 10: _VALIDITY_FIX, 62: _NAME_FIX, 64: _NAME_FIX}
"""By OpenSSL's X509_V_ERR: not yet valid, expired, another host name, another address."""
_OTHER_CERTIFICATE_FIX: Final = "give the certificate of the authority that issued it as ca_file"
_NO_RIGHT: Final = "the right to write with If-None-Match"
_RIGHT_FIX: Final = (
    "allow PUT with this header (s3:PutObject without a condition on s3:if-none-match in S3's"
    " policies)"
)
_UNCONDITIONAL_FIX: Final = (
    "you need to change nothing: of two writers the last one counts, and KV stays right; "
    "see docs/run/storage.md#stores-without-conditional-writes"
)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of a probe; `fix` is empty if there is nothing to do."""

    works: bool
    detail: str
    fix: str = ""
    accepts: bool = False
    """The store does not work, but its address accepts connections."""
    is_limited: bool = False
    """The store works, but without conditional writes or without a listing."""


async def probe_store(location: StoreLocation) -> ProbeResult:
    """Write, read, compare, list and delete one object in the namespace."""
    try:
        objects = open_store(location)
    except LocationError as err:
        fix = "correct the files of the credentials, ca_file, or the environment's variables AWS_…"
        return ProbeResult(False, str(err), fix)
    allowed: list[str] = []
    try:
        async with asyncio.timeout(_SECONDS):
            return await _exercise(objects, location, allowed)
    except TimeoutError:
        return await _explain_silence(location)
    except StoreDenied as err:
        return await _explain_denial(err, location, objects, allowed)
    except StoreError as err:
        return await _explain(err, location)
    finally:
        await objects.close()


async def _exercise(
    objects: ObjectStore, location: StoreLocation, allowed: list[str]
) -> ProbeResult:
    """`allowed` gets those of _RIGHTS that the store has granted."""
    name = f"probe.{uuid.uuid4().hex}"
    lacks, fixes = [], []
    await objects.put(name, (_PAYLOAD,))
    allowed.append("write")
    try:
        read = bytes(await objects.get(name, 1 << 10))
        allowed.append("read")
        if read != _PAYLOAD:
            return ProbeResult(
                False,
                "the store returned other bytes than were written",
                "do not use a cache or a proxy that changes bodies before the store",
            )
        if (lack := await _conditions(objects, name)) is not None:
            lacks.append(lack)
            fixes.append(_UNCONDITIONAL_FIX)
            if lack == _NO_RIGHT:
                fixes.append(f"to give this right, {_RIGHT_FIX} in {location.namespace}")
        is_listed = await _lists(objects, name)
        allowed.append("list")
        if not is_listed:
            lacks.append("a listing of what was just written")
            fixes.append(
                "bound the namespace in the store itself, for instance by a lifecycle rule"
            )
    finally:
        await objects.delete(name)
    if lacks:
        detail = f"reads and writes, but lacks {' and '.join(lacks)}"
        return ProbeResult(True, detail, "; ".join(fixes), is_limited=True)
    return ProbeResult(True, f"reads, writes and lists {location.namespace}")


async def _conditions(objects: ObjectStore, name: str) -> str | None:
    """What the store lacks to write `name` only if it does not exist; None: nothing."""
    try:
        await objects.put_if(name, (_PAYLOAD,), None)
    except ObjectExists:
        return None
    except StoreUnsupported:
        return "conditional writes"
    except StoreExpired:
        raise
    except StoreDenied:
        return _NO_RIGHT
    return "conditional writes: it ignores If-None-Match"


async def _lists(objects: ObjectStore, name: str) -> bool:
    try:
        return name in [info.name async for info in objects.scan()]
    except StoreUnsupported:
        return False


async def _explain(err: StoreError, location: StoreLocation) -> ProbeResult:
    if isinstance(err, StoreFull):
        return ProbeResult(
            False,
            "the store takes no more bytes",
            "give it more space, or set capacity_bytes so that unused chunks leave",
        )
    if isinstance(err, ObjectMissing):
        if location.protocol is Protocol.S3:
            return ProbeResult(
                False,
                f"the bucket {location.bucket!r} does not exist",
                "create it, or change the first segment of kv_namespace",
            )
        return ProbeResult(
            False,
            f"the store has no path {location.namespace}",
            "create it, or change kv_namespace; an S3 store needs credentials or the protocol s3",
        )
    if isinstance(err, StoreUnavailable) and location.protocol is not Protocol.FILE:
        return await _explain_connection(location)
    return ProbeResult(False, str(err), "see docs/run/storage.md for what a store must support")


async def _explain_denial(
    err: StoreDenied, location: StoreLocation, objects: ObjectStore, allowed: list[str]
) -> ProbeResult:
    if isinstance(err, StoreExpired):
        return ProbeResult(
            False,
            "the credentials have expired",
            "write new ones to the Secret, or mend what rotates them; engines need no restart",
        )
    if location.protocol is Protocol.FILE:
        return ProbeResult(
            False,
            f"{location.directory} cannot be written",
            "give the engines' user the right to write there",
        )
    skew = await _clock_skew(location)
    if skew is not None and abs(skew) > _SKEW:
        return ProbeResult(
            False,
            f"the store refused the signature, and its clock differs by {skew:+.0f} s",
            "set both clocks by NTP: S3 refuses signatures that are 15 minutes off",
        )
    if not allowed and await _may_read(objects):
        allowed.append("read")
    if allowed:
        denied = next(right for right in _RIGHTS if right not in allowed)
        return ProbeResult(
            False,
            f"the credentials may {' and '.join(allowed)}, but not {denied}",
            f"give them the right to {denied} in {location.namespace}"
            f" ({_RIGHTS[denied]} in S3's policies)",
        )
    return ProbeResult(
        False,
        "the store refused the credentials",
        f"check the keys, and that they may get, put, list and delete in {location.namespace}",
    )


async def _may_read(objects: ObjectStore) -> bool:
    """Whether the store answers that an object is missing, instead of refusing to look."""
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            await objects.get(f"probe.{uuid.uuid4().hex}", 1 << 10)
    except ObjectMissing:
        return True
    except (StoreError, TimeoutError):
        return False
    return True


async def _explain_silence(location: StoreLocation) -> ProbeResult:
    """Explain a timeout: no answer, or only a part of it, came in time."""
    if location.protocol is Protocol.FILE:
        return ProbeResult(
            False,
            f"reading and writing in {location.directory} took more than {_SECONDS:.0f} s",
            "check the mounted file system and its server",
        )
    connection = await _explain_connection(location)
    if not connection.accepts:
        return connection
    return ProbeResult(
        False,
        f"{location.endpoint} accepts connections, but does not answer within {_SECONDS:.0f} s",
        "the connection is half-open: restart the store, or what stands before it, if its process"
        " hangs or has too much load; else check firewalls that drop packets in mid-connection",
    )


async def _explain_connection(location: StoreLocation) -> ProbeResult:
    """Resolve, connect and start TLS, to name the step that fails."""
    parts = urlsplit(location.host_url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    context = None
    try:
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=location.ca_file)
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
        certificate = writer.get_extra_info("peercert") or {}
        writer.close()
    except ssl.SSLCertVerificationError as err:
        return ProbeResult(
            False,
            f"the certificate of {host} is not trusted: {err.verify_message}",
            _CERTIFICATE_FIXES.get(err.verify_code, _OTHER_CERTIFICATE_FIX),
        )
    except ssl.SSLError as err:
        return ProbeResult(
            False,
            f"no TLS with {host}:{port}: {err.reason}",
            "use http:// if the store has no TLS, or correct the port",
        )
    except socket.gaierror:
        return ProbeResult(False, f"the name {host} is not known", "correct the endpoint, or DNS")
    except (TimeoutError, OSError) as err:
        reason = "no answer in time"
        if not isinstance(err, TimeoutError):
            # After several addresses the error has no number, and its text has all reasons.
            reason = os.strerror(err.errno) if err.errno else str(err)
        return ProbeResult(
            False,
            f"no connection to {host}:{port}: {reason}",
            "start the store, or open the network path to it",
        )
    # OpenSSL, which was asked here, accepts an authority as a server; the TLS of obstore does not.
    is_self_signed = certificate and certificate["subject"] == certificate["issuer"]
    if is_self_signed and location.protocol is Protocol.S3:
        return ProbeResult(
            False,
            f"{host}:{port} does not answer as s3 store over TLS; its certificate is self-signed",
            "if `openssl x509 -noout -ext basicConstraints` shows CA:TRUE for it, make one with"
            " CA:FALSE, or issue one from an authority; else check the protocol and the store",
            accepts=True,
        )
    return ProbeResult(
        False,
        f"{host}:{port} accepts connections, but does not answer as {location.protocol} store",
        "check the endpoint, the protocol, and the store's log",
        accepts=True,
    )


async def _clock_skew(location: StoreLocation) -> float | None:
    """Seconds by which the store's clock is ahead, from the header Date; None: not known."""
    # TLS unverified: no secret is sent, and the header only changes a message.
    try:
        timeout = aiohttp.ClientTimeout(total=_CONNECT_SECONDS)
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.get(location.endpoint, allow_redirects=False, ssl=False) as answer,
        ):
            return parsedate_to_datetime(answer.headers["Date"]).timestamp() - time()
    except (aiohttp.ClientError, OSError, KeyError, ValueError):
        return None
