"""`KvReference`: where KV of a prompt's prefix lies in external storage.

A prefill engine writes it, the decode engine reads it; between them it travels as one object in
`kv_transfer_params`, beside the fields of the other connectors.
"""

import re
from typing import Final

import msgspec

TENSOR_FORMAT: Final = "tandem-kv/1"
"""The format of the objects that this release writes, and the only one that it reads. It changes
whenever an older reader would misread the objects."""

REFERENCE: Final = "tandem_kv_reference"
"""Key of the object in `kv_transfer_params`."""

_HASH: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


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
