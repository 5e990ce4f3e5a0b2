"""A signed header: its MAC, its base64url, and both together."""

import hashlib
from binascii import b2a_base64
from functools import lru_cache
from typing import Final

_TO_URL: Final = bytes.maketrans(b"+/", b"-_")
_MAC_BYTES: Final = 16
_BLOCK_BYTES: Final = 64
"""Of SHA-256."""
_INNER: Final = bytes(byte ^ 0x36 for byte in range(256))
_OUTER: Final = bytes(byte ^ 0x5C for byte in range(256))
"""HMAC's pads, as tables for `bytes.translate`."""


def signed(prefix: bytes, payload: bytes, secret: bytes) -> str:
    """The whole header: `prefix`, `payload` in base64url, a dot, and the MAC of both."""
    head = prefix + base64url(payload)
    return (head + b"." + header_mac(head, secret)).decode()


def header_mac(head: bytes, secret: bytes) -> bytes:
    """HMAC-SHA256 of `head`, cut to 128 bits, in base64url."""
    # HMAC (RFC 2104) in two steps whose keyed beginnings are kept. `hmac` does the same, but sets
    # up OpenSSL's HMAC anew for each message, which takes twice as long as the rest of it.
    keyed_inner, keyed_outer = _keyed(secret)
    # Copies, because `update` changes a hash.
    inner, outer = keyed_inner.copy(), keyed_outer.copy()
    inner.update(head)
    outer.update(inner.digest())
    return base64url(outer.digest()[:_MAC_BYTES])


@lru_cache(maxsize=32)
def _keyed(secret: bytes) -> tuple["hashlib._Hash", "hashlib._Hash"]:
    """SHA-256 that has taken in the key, as HMAC's inner and outer hash."""
    block = hashlib.sha256(secret).digest() if len(secret) > _BLOCK_BYTES else secret
    block = block.ljust(_BLOCK_BYTES, b"\0")
    return hashlib.sha256(block.translate(_INNER)), hashlib.sha256(block.translate(_OUTER))


def base64url(data: bytes) -> bytes:
    """Base64url without padding, in fewer calls than `base64.urlsafe_b64encode`."""
    # `translate` would also remove the padding, but then it makes a table for each call.
    return b2a_base64(data, newline=False).rstrip(b"=").translate(_TO_URL)
