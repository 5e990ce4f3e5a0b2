"""How KV moves from the prefill engine to the decode engine: one class for each vLLM connector.

A connector writes the request bodies of a hand-off and reads the prefill's answer. It does no I/O:
the driver in `tandem_sidecar.handoff` sends what it returns. A class implements the core protocol
`Connector`:

    prefill_body(kind, body, attempt)        body of the prefill leg
    kv_hold(attempt, answer)                 the KV that a prefill's 2xx answer makes readable
    decode_body(kind, body, kv_hold)         body of the decode leg, which reads that KV
    release_request(kind, body, kv_hold)     request that frees KV which will not be read, or None
    release_is_notification                  whether that request only notifies the producer
    decode_may_wait_forever                  whether decode waits without limit for missing KV

and, only where it needs them, the optional protocols

    ConcurrentLegs   expected_kv_hold        both legs run at once, matched by an id; with None
                                             those of this attempt do not
                     stream_source, forget_source     which prefill engines serve streams
    PeerDiscovery    peer_query, record_peer, forget_peer     the prefill pod must be queried first

`make_connector` resolves the optional protocols once, at start. To add a connector: its name in
`tandem_contract.connectors`, a module here, and one entry in `_REGISTRY`. `protocol` holds the
types; `nixl` is the module to read first. With concurrent legs, `kv_hold` still reads the prefill's
answer, to find out whether the decode leg waits for KV that will never come.

    make_connector("nixl", ConnectorOptions()) -> ResolvedConnector
"""

from collections.abc import Callable, Mapping
from typing import Final

from tandem_contract.connectors import ConnectorName

from .lmcache import LmCache
from .mooncake import Mooncake
from .nixl import Nixl
from .nixl_push import NixlPush
from .offloading import Offloading
from .protocol import Connector, ConnectorOptions, ResolvedConnector, resolve
from .storage import Storage

_REGISTRY: Final[Mapping[ConnectorName, Callable[[ConnectorOptions], Connector]]] = {
    ConnectorName.NIXL: Nixl,
    ConnectorName.NIXL_PUSH: NixlPush,
    # vLLM's MultiConnector loads from the first connector of its chain that has the tokens, and a
    # prefill's answer merges the parameters of all of them. So with NIXL first the legs are NIXL's,
    # and what the other connectors add to the object travels with it.
    ConnectorName.MULTI: Nixl,
    ConnectorName.MOONCAKE: Mooncake,
    ConnectorName.OFFLOADING: Offloading,
    ConnectorName.LMCACHE: LmCache,
    ConnectorName.LMCACHE_MP: LmCache,
    ConnectorName.STORAGE: Storage,
}

NAMES: Final = tuple(name.value for name in _REGISTRY)
"""Values of `--connector`."""
PLANNED: Final = tuple(name.value for name in ConnectorName if name not in _REGISTRY)
"""Connectors that a pool may name and that the sidecar does not support yet."""


class UnknownConnector(ValueError):
    """No such connector; the message lists the supported ones."""


def check_name(name: str) -> str:
    """Return `name` if that connector is supported. Raises UnknownConnector."""
    if name in NAMES:
        return name
    problem = f"{name!r} is not supported yet" if name in PLANNED else f"no connector {name!r}"
    raise UnknownConnector(f"{problem}: use one of {', '.join(NAMES)}")


def make_connector(name: str, options: ConnectorOptions) -> ResolvedConnector:
    """Create the connector of that name, its optional protocols resolved. Raises UnknownConnector.

    A change of `options.tokenize_once` takes effect from the next request on.
    """
    return resolve(_REGISTRY[ConnectorName(check_name(name))](options))


__all__ = [
    "NAMES",
    "PLANNED",
    "ConnectorOptions",
    "ResolvedConnector",
    "UnknownConnector",
    "check_name",
    "make_connector",
]
