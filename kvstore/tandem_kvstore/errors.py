"""Errors of this package, and the reasons by which engines count chunks that were not loaded.

KvStoreError
  LocationError         the endpoint, namespace or credentials cannot be used: a setting is wrong
  StoreError            one operation on the store failed
    ObjectMissing       404
    ObjectEmpty         416: a part of an object without bytes was asked for
    ObjectExists        a conditional write found another object there
    ObjectTooLarge      longer than the caller's limit
    StoreDenied         401 or 403: credentials or rights
      StoreExpired      the credentials were valid and have expired
    StoreFull           the store takes no more bytes: no space, or a quota
    StoreUnavailable    no answer, a broken connection, 5xx: try later
      StoreTimeout      no answer in time
    StoreUnsupported    this kind of store has no such operation
  KvRejected            the object exists and must not be used; has a `reason`
"""

from enum import StrEnum
from typing import Final

import msgspec

UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not the JSON that was asked for."""


class Reason(StrEnum):
    """Why KV was not loaded, or not stored: the label `reason` of the engine's metrics."""

    MISSING = "missing"
    """No such chunk, or a data object that its manifest names does not exist."""
    TRUNCATED = "truncated"
    """An object is shorter than its manifest says."""
    CORRUPT = "corrupt"
    """Bytes do not match their checksum."""
    SWAPPED = "swapped"
    """The manifest at this key describes another prefix."""
    FOREIGN = "foreign"
    """Written by an engine with another model, layout or settings."""
    FORMAT = "format"
    """Written in a format that this release does not read."""
    TIMEOUT = "timeout"
    """The deadline ended before the load or the write."""
    UNAVAILABLE = "unavailable"
    """The store did not answer, or broke the connection."""
    DENIED = "denied"
    """The store refused the credentials."""
    FULL = "full"
    """The store takes no more bytes."""
    BREAKER_OPEN = "breaker_open"
    """The circuit breaker is open: the store was not asked."""
    UNPROFITABLE = "unprofitable"
    """Computing is predicted to be faster than loading: the store was not asked."""
    BUSY = "busy"
    """Too many writes were queued: this chunk was not stored."""
    OTHER = "other"
    """A defect: the engine's log has the traceback."""


class KvStoreError(Exception):
    """Root of this package's errors."""


class LocationError(KvStoreError, ValueError):
    """A setting of the store that cannot be used."""


class StoreError(KvStoreError):
    """One operation on the store failed. The message has no secret."""

    reason = Reason.UNAVAILABLE


class ObjectMissing(StoreError):
    """There is no such object."""

    reason = Reason.MISSING


class ObjectEmpty(StoreError):
    """A part of an object without bytes was asked for. `get` returns no bytes instead."""


class ObjectExists(StoreError):
    """A conditional write found another object there."""


class ObjectTooLarge(StoreError):
    """The object is longer than the caller's limit."""

    reason = Reason.CORRUPT


class StoreDenied(StoreError):
    """The store refused the credentials, or they lack a right."""

    reason = Reason.DENIED


class StoreExpired(StoreDenied):
    """The credentials, or their session token, have expired: they must be rotated."""


class StoreFull(StoreError):
    """The store takes no more bytes."""

    reason = Reason.FULL


class StoreUnavailable(StoreError):
    """The store did not answer, or answered with a server error: try later."""


class StoreTimeout(StoreUnavailable):
    """The store did not answer in time."""

    reason = Reason.TIMEOUT


class StoreUnsupported(StoreError):
    """This kind of store has no such operation."""


class KvRejected(KvStoreError):
    """The object exists and must not be used; the message says which check failed."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def message_of(err: KvStoreError) -> str:
    """The error's message without the operation and the object that it begins with: equal for all
    objects, because it becomes the label of a metric."""
    text = str(err)
    return text.partition(": ")[2] or text
