"""`tandem_producer_proof` of `kv_transfer_params`: a prefill engine signs the address of its KV.

    v1.<key id>.<mac>      mac: HMAC-SHA256 over engine id, host and port, base64url, 128 bits

Written by the reference engine when it acts as prefill, with the transfer keys of its set. The
sidecar passes it on. The reference engine checks it when it acts as decode, before it connects: so
a request that reached it past the sidecar cannot make it connect to a host of the client's choice.
"""

import hmac
from collections.abc import Mapping

import msgspec

from .plan import signing_key
from .plan_mac import header_mac

_VERSION = "v1"


def sign_producer(
    engine_id: str, host: str, port: int, keys: Mapping[str, bytes], *, now: float
) -> str:
    """The proof, by the key that signs at `now` (Unix seconds). Raises ValueError without a key."""
    key = signing_key(keys, now)
    return f"{_VERSION}.{key}.{_mac(engine_id, host, port, keys[key])}"


def is_proven(
    proof: str | None, engine_id: str, host: str, port: int, keys: Mapping[str, bytes]
) -> bool:
    """Whether a holder of one of `keys` has signed this producer."""
    version, _, rest = (proof or "").partition(".")
    key, _, mac = rest.partition(".")
    if version != _VERSION or key not in keys or not mac.isascii():
        return False
    return hmac.compare_digest(mac, _mac(engine_id, host, port, keys[key]))


def _mac(engine_id: str, host: str, port: int, secret: bytes) -> str:
    # The first word keeps a signed plan from being a proof, and the other way round.
    content = msgspec.json.encode(("tandem-producer", engine_id, host, port))
    return header_mac(content, secret).decode()
