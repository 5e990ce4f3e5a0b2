"""`kv_transfer_params` of connectors that run both legs at once and match them by a shared id.

The sidecar writes them; vLLM's MooncakeConnector, and OffloadingConnector with its tier `p2p`, read
them.
"""

import msgspec

from . import ports


class MooncakePrefill(msgspec.Struct, frozen=True):
    """Prefill leg: keep the KV for the decode engine that asks with this id."""

    transfer_id: str
    do_remote_decode: bool = True
    do_remote_prefill: bool = False


class MooncakeDecode(msgspec.Struct, frozen=True):
    """Decode leg: which producer to ask for the KV."""

    transfer_id: str
    remote_bootstrap_addr: str
    """`http://host:port` of the prefill pod's bootstrap server."""
    remote_engine_id: str
    """As the bootstrap server reports it; a restarted engine has a new one."""
    do_remote_prefill: bool = True
    do_remote_decode: bool = False


class MooncakeRank(msgspec.Struct, frozen=True):
    """One data-parallel rank in the bootstrap server's answer, a map from rank to this."""

    engine_id: str


BOOTSTRAP_QUERY = b"/query"
"""Request target of the bootstrap server (port `ports.MOONCAKE_BOOTSTRAP`)."""


class OffloadingPeerOfPrefill(msgspec.Struct, frozen=True):
    """The id under which the decode engine asks for the blocks."""

    kv_request_id: str


class OffloadingPeerOfDecode(msgspec.Struct, frozen=True):
    """The same id, and the address of the prefill engine's peer-to-peer tier."""

    kv_request_id: str
    remote_host: str
    remote_port: int = ports.OFFLOADING_P2P
    """Plus the data-parallel rank."""


class OffloadingPrefill(msgspec.Struct, frozen=True):
    """Prefill leg. The connector reads `remote_decoder` only. `do_remote_decode` is for vLLM's
    messages API, which otherwise refuses `max_tokens: 1` beside a thinking budget."""

    remote_decoder: OffloadingPeerOfPrefill
    do_remote_decode: bool = True


class OffloadingDecode(msgspec.Struct, frozen=True):
    """Decode leg."""

    remote_prefiller: OffloadingPeerOfDecode
