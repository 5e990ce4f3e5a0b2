"""`KvReference`: names the stored KV of a prompt's prefix.

A hand-off through storage has it in `kv_transfer_params`:

    prefill request   sidecar → engine   StoreLeg: store the KV, and name it in the answer
    prefill answer    engine → sidecar   StoreAnswer, when a look-up finds the KV in the store
    decode request    sidecar → engine   LoadLeg: the reference of the answer, and a time limit

Errors: `KvReferenceUnusable`.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

TENSOR_FORMAT: Final = "tandem-kv/2"
"""Format of the objects that this release writes; it reads no other. It changes whenever an older
release would misread the objects."""

REFERENCE: Final = "tandem_kv_reference"
"""Key of the KvReference in `kv_transfer_params`."""

_HASH: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


STORE: Final = "tandem_kv_store"
"""Key of a prefill leg's StoreLeg in `kv_transfer_params`."""

LOAD_TIMEOUT: Final = "tandem_kv_load_timeout"
"""Key of the seconds that a decode engine may take to load the KV, next to REFERENCE."""

MAX_TIMEOUT: Final = 3600.0
"""Longest time limit in seconds that an engine accepts, because it keeps blocks for a load."""


class KvReferenceUnusable(ValueError):
    """A KvReference that must not be loaded; the message says why."""


class KvReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The KV of the first `token_count` tokens of a prompt, stored at `path`."""

    path: str
    """`{kv_namespace}/{prefix_hash}`, below the endpoint in each engine's configuration. The
    reference has no endpoint: a request must not make an engine connect to another host."""
    prefix_hash: str
    """Key of the prefix's last chunk, 64 hexadecimal digits. It covers all tokens of the prefix."""
    token_count: int
    """Tokens of the prefix."""
    tensor_format: str = TENSOR_FORMAT


def read_reference(data: object) -> KvReference:
    """The reference in a decoded JSON object.

    Raises KvReferenceUnusable if a field is missing or wrong, or if another release wrote it.
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
    """The request of a prefill leg: store the prompt's KV."""

    timeout: Annotated[float, msgspec.Meta(gt=0, le=MAX_TIMEOUT)]
    """Seconds after the prefill within which the KV must be in the store."""


class StoreAnswer(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The `kv_transfer_params` of a prefill leg's answer. Exactly one field is set."""

    tandem_kv_reference: KvReference | None = None
    """KV that was in the store when the engine answered."""
    tandem_kv_not_stored: str | None = None
    """Why no KV is stored: SHORT, or a value of `tandem_kvstore.errors.Reason`."""


class LoadLeg(msgspec.Struct, frozen=True, gc=False):
    """The `kv_transfer_params` of a decode leg."""

    tandem_kv_reference: KvReference
    tandem_kv_load_timeout: Annotated[float, msgspec.Meta(gt=0, le=MAX_TIMEOUT)]
    """Seconds after which the engine ends the load and computes the rest; it ends each load after
    four minutes, since the collector may then delete the data."""


SHORT: Final = "short"
"""The prompt is shorter than a chunk: there is nothing to store. This is no failure."""


def load_leg(value: Mapping[str, Any]) -> LoadLeg:
    """The LoadLeg in decoded `kv_transfer_params`.

    Raises KvReferenceUnusable if it is incomplete, or if another release wrote it.
    """
    reference = read_reference(value.get(REFERENCE))
    try:
        return msgspec.convert({**value, REFERENCE: reference}, LoadLeg)
    except msgspec.ValidationError as err:
        raise KvReferenceUnusable(f"{LOAD_TIMEOUT}: {err}") from err
