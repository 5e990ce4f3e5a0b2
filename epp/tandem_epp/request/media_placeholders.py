"""The media of a generate request in the key of its prompt: where they are among its token ids."""

from typing import Final

import msgspec
from msgspec import Raw, Struct
from xxhash import xxh3_128_digest


class _Placeholder(Struct):
    offset: int
    length: int


class _Features(Struct):
    """Where a generate request's media are among its token ids."""

    mm_hashes: dict[str, list[str]] = {}
    mm_placeholders: dict[str, list[_Placeholder]] = {}


_features: Final = msgspec.json.Decoder(_Features)


def with_media(data: bytes, raw: Raw) -> bytes:
    """Token ids with the hash of each media part in the place of its placeholder's first ids: they
    are the same for every image."""
    try:
        features = _features.decode(raw)
    except msgspec.ValidationError:
        # Null, or what the engine refuses.
        return data
    ids = bytearray(data)
    for modality, hashes in features.mm_hashes.items():
        places = features.mm_placeholders.get(modality, [])
        for name, place in zip(hashes, places, strict=False):
            start, end = 4 * place.offset, 4 * (place.offset + place.length)
            if 0 <= start < end <= len(ids):
                digest = xxh3_128_digest(name.encode())[: end - start]
                ids[start : start + len(digest)] = digest
    return bytes(ids)
