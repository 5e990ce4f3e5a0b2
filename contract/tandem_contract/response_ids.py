"""Ids of stored responses, which tell whose engine stores them.

    resp_<tag: 12 hex digits><random: 32 hex digits>

vLLM keeps a response in the memory of the engine that computed it, and takes the response's id from
the body's `request_id`, which no client may set. So the sidecar, and the router, give each request
for `/v1/responses` an id with the tag of the backend that serves it. A later request that names the
id (`previous_response_id`, or a path below `/v1/responses`) goes to that backend: every EPP replica
finds it among its backends by the tag, also after a restart, and keeps no table for it.

The tag is a hash of the backend's name, so it tells no address. An id of another origin has the tag
of no backend, and its request may go to any: the engine there knows the id, or answers 404.
"""

import secrets
from functools import lru_cache
from hashlib import sha256
from typing import Final

from .request_kinds import PATHS, RequestKind

PREVIOUS: Final = "previous_response_id"
"""Client → engine, a field of `/v1/responses`: the stored response that the request continues."""

_PREFIX: Final = "resp_"
_BELOW: Final = PATHS[RequestKind.RESPONSES] + "/"
_TAG_DIGITS: Final = 12
"""48 bits: two of 1,000 backends have the same tag once in 500 million sets of names."""
_RANDOM_BYTES: Final = 16
"""The id is all that reading the response takes, so it must not be guessed."""


def new_response_id(backend: str) -> str:
    """A fresh id for a response that the backend of this name stores."""
    return f"{_PREFIX}{_tag(backend)}{secrets.token_hex(_RANDOM_BYTES)}"


def has_tag_of(response_id: str, backend: str) -> bool:
    """Whether the id was made for a response that the backend of this name stores."""
    return response_id.startswith(_tag(backend), len(_PREFIX))


def response_id_in(target: str) -> str:
    """The id in a path below `/v1/responses`, such as that of a cancellation; empty: none."""
    if not target.startswith(_BELOW):
        return ""
    return target[len(_BELOW) :].partition("?")[0].partition("/")[0]


@lru_cache(maxsize=4096)
def _tag(backend: str) -> str:
    return sha256(backend.encode()).hexdigest()[:_TAG_DIGITS]
