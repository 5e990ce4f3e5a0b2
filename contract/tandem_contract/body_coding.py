"""Content-Encoding of requests: a body with a coding is refused, so that every server reads the
same bytes.

Bytes can be valid JSON and valid deflate at once. A server that checks the one and forwards it to a
server that reads the other checks nothing. So no server of Tandem inflates a body, and each one
that reads or forwards bodies answers `REFUSED_STATUS` to a coded one.
"""

from typing import Final

CONTENT_ENCODING: Final = "content-encoding"
"""Client → EPP, sidecar, engine: the codings of the body, with commas (RFC 9110 §8.4)."""

REFUSED_STATUS: Final = 415
REFUSED_MESSAGE: Final = (
    "the request body has a Content-Encoding: send it uncompressed, without this header"
)
ACCEPTED: Final = ("accept-encoding", "identity")
"""Server → client, with the refusal: the codings that requests may have (RFC 9110 §15.5.16)."""

_NO_CODING: Final = frozenset({"", "identity"})


def is_coded(content_encoding: str) -> bool:
    """Whether the value of a Content-Encoding header names a coding."""
    return not _NO_CODING.issuperset(
        coding.strip(" \t").lower() for coding in content_encoding.split(",")
    )
