"""`KvReference`: where KV of a prompt's prefix lies in external storage.

A hand-off through storage carries it in `kv_transfer_params`:

    prefill request   sidecar → engine   StoreLeg: "store the KV, and name it in the answer"
    prefill answer    engine → sidecar   StoreAnswer, once the store shows the KV to other engines
    decode request    sidecar → engine   LoadLeg: the reference of that answer, and a time limit

Errors: `KvReferenceUnusable`.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

TENSOR_FORMAT: Final = "tandem-kv/2"
"""The format of the objects that this release writes, and the only one that it reads. It changes
whenever an older reader would misread the objects."""

REFERENCE: Final = "tandem_kv_reference"
"""Key of the object in `kv_transfer_params`."""

_HASH: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


STORE: Final = "tandem_kv_store"
"""Key of a prefill leg's StoreLeg in `kv_transfer_params`."""

LOAD_TIMEOUT: Final = "tandem_kv_load_timeout"
"""Key of the seconds, beside the reference, that a decode engine may take to load the KV."""

MAX_TIMEOUT: Final = 3600.0
"""Longest time limit that an engine accepts, in seconds: it keeps blocks for a load meanwhile."""


class KvReferenceUnusable(ValueError):
    """A KvReference that must not be loaded; the message says why."""


class KvReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """KV of the first `token_count` tokens of a prompt, which lies at `path`."""

    path: str
    """`{kv_namespace}/{prefix_hash}`, below the endpoint that both engines are configured with.
    The reference has no endpoint: a request must not make an engine connect to another host."""
    prefix_hash: str
    """Key of the last chunk, 64 hexadecimal digits: it covers all tokens up to that chunk's end."""
    token_count: int
    """Tokens from the start of the prompt that the chain of chunks covers."""
    tensor_format: str = TENSOR_FORMAT


def read_reference(data: object) -> KvReference:
    """The reference in a decoded JSON object.

    Raises KvReferenceUnusable when a field is missing or wrong, or when another release wrote it.
    """
    try:
        reference = msgspec.convert(data, KvReference)
    except msgspec.ValidationError as err:
        raise KvReferenceUnusable(f"{REFERENCE}: {err}") from err
    if reference.tensor_format != TENSOR_FORMAT:
        raise KvReferenceUnusable(
            f"{REFERENCE}: tensor_format is {reference.tensor_format!r}, this release reads "
            f"{TENSOR_FORMAT}: run one release on both sides"
        )
    if not _HASH.fullmatch(reference.prefix_hash) or reference.token_count < 1:
        raise KvReferenceUnusable(f"{REFERENCE}: prefix_hash or token_count is no valid value")
    if reference.path.rpartition("/")[2] != reference.prefix_hash:
        raise KvReferenceUnusable(f"{REFERENCE}: path does not end in prefix_hash")
    return reference


class StoreLeg(msgspec.Struct, frozen=True, gc=False):
    """What a prefill leg asks of its engine."""

    timeout: Annotated[float, msgspec.Meta(gt=0, le=MAX_TIMEOUT)]
    """Seconds after the prefill in which the KV has to be in the store."""


class StoreAnswer(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The `kv_transfer_params` of a prefill leg's answer. Exactly one field is set."""

    tandem_kv_reference: KvReference | None = None
    """KV that was in the store when the engine answered."""
    tandem_kv_not_stored: str | None = None
    """Why there is none: `short`, when the prompt has not even one chunk, or a reason of
    `tandem_kvstore.errors.Reason`."""


class LoadLeg(msgspec.Struct, frozen=True, gc=False):
    """The `kv_transfer_params` of a decode leg."""

    tandem_kv_reference: KvReference
    tandem_kv_load_timeout: Annotated[float, msgspec.Meta(gt=0, le=MAX_TIMEOUT)]
    """Seconds in which the KV has to be loaded; after them the engine computes the rest."""


SHORT: Final = "short"
"""The prompt has not even one chunk: there is nothing to store, and that is no failure."""


def load_leg(value: Mapping[str, Any]) -> LoadLeg:
    """The decode leg's parameters in a decoded request body.

    Raises KvReferenceUnusable when they are incomplete, or when another release wrote them.
    """
    reference = read_reference(value.get(REFERENCE))
    try:
        return msgspec.convert({**value, REFERENCE: reference}, LoadLeg)
    except msgspec.ValidationError as err:
        raise KvReferenceUnusable(f"{LOAD_TIMEOUT}: {err}") from err
