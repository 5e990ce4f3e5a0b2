"""`kv_transfer_params` of connectors whose two legs run at once, matched by an id both are given.

The sidecar writes them, vLLM's MooncakeConnector and OffloadingConnector (tier `p2p`) read them.
"""

import msgspec

from . import ports


class MooncakePrefill(msgspec.Struct, frozen=True):
    """Of the prefill leg: keep the KV for whoever asks with this id."""

    transfer_id: str
    do_remote_decode: bool = True
    do_remote_prefill: bool = False


class MooncakeDecode(msgspec.Struct, frozen=True):
    """Of the decode leg: whom to ask."""

    transfer_id: str
    remote_bootstrap_addr: str
    """`http://host:port` of the prefill pod's registry."""
    remote_engine_id: str
    """What the registry says it is; another after a restart."""
    do_remote_prefill: bool = True
    do_remote_decode: bool = False


class MooncakeRank(msgspec.Struct, frozen=True):
    """One data-parallel rank in the registry's answer, which maps ranks to these."""

    engine_id: str


BOOTSTRAP_QUERY = b"/query"
"""Target of the registry's question (port `ports.MOONCAKE_BOOTSTRAP`)."""


class PeerOfPrefill(msgspec.Struct, frozen=True):
    """Under which id the blocks are asked for."""

    kv_request_id: str


class PeerOfDecode(msgspec.Struct, frozen=True):
    """The same, and of whom."""

    kv_request_id: str
    remote_host: str
    remote_port: int = ports.OFFLOADING_P2P
    """Plus the data-parallel rank."""


class OffloadingPrefill(msgspec.Struct, frozen=True):
    """Of the prefill leg. The tier looks at `remote_decoder` alone; messages let `max_tokens: 1`
    stand beside a thinking budget only where `do_remote_decode` says what it is for."""

    remote_decoder: PeerOfPrefill
    do_remote_decode: bool = True


class OffloadingDecode(msgspec.Struct, frozen=True):
    """Of the decode leg."""

    remote_prefiller: PeerOfDecode
