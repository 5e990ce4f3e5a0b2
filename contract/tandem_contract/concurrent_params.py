"""`kv_transfer_params` of hand-offs that run both legs at once and match them by a shared id.

The sidecar writes them. vLLM's MooncakeConnector, and OffloadingConnector with its tier `p2p`, read
their own; the reference engine reads those of a streamed hand-off, in which the decode engine reads
the KV while the prefill engine computes it.
"""

from typing import Annotated, Final

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


STREAM: Final = "tandem_stream"
"""Key of `PrefillStream` and of `DecodeStream` in the object of the legs. Engines that do not know
it ignore it: a prefill engine then holds the KV as ever, a decode engine computes the prompt."""

STREAM_ID_LIMIT: Final = 512
"""Most characters of a stream's id."""

_StreamId = Annotated[str, msgspec.Meta(min_length=1, max_length=STREAM_ID_LIMIT)]


class PrefillStream(msgspec.Struct, frozen=True, gc=False):
    """Prefill leg: the id under which a decode engine reads the KV while it is computed."""

    id: _StreamId


class StreamSource(msgspec.Struct, frozen=True, gc=False):
    """Where a prefill engine serves streams; the sidecar takes it from an earlier answer."""

    engine_id: Annotated[str, msgspec.Meta(min_length=1)]
    """A restarted engine has another id and refuses the read."""
    host: Annotated[str, msgspec.Meta(min_length=1)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    proof: str | None = None
    """`tandem_producer_proof` of that answer."""

    def is_engine(self, other: "StreamSource | None") -> bool:
        """Whether `other` is the same engine. Its proof changes with each rotation of the keys."""
        return other is not None and other.engine_id == self.engine_id


class DecodeStream(msgspec.Struct, frozen=True, gc=False):
    """Decode leg: the id of the prefill leg, and the engine that computes it."""

    id: _StreamId
    source: StreamSource


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
