"""How each KV connector's two legs are written, one file per connector.

The Protocol they satisfy is declared where it is used: `tandem_sidecar.handoff.context.Connector`.
`handover` holds what passes between them; `nixl` is the one to read first.

    make("nixl", tokenize_once=True, peer_port=None) -> Connector
"""

from collections.abc import Callable, Mapping
from typing import Final

from tandem_contract import ports

from . import mooncake, multi, nixl, nixl_push, offloading

AnyConnector = nixl.Nixl | mooncake.Mooncake | offloading.Offloading

_Make = Callable[[bool, int | None], AnyConnector]

_MAKERS: Final[Mapping[str, _Make]] = {
    nixl.NAME: lambda once, _: nixl.Nixl(tokenize_once=once),
    nixl_push.NAME: lambda once, _: nixl_push.NixlPush(tokenize_once=once),
    multi.NAME: lambda once, _: multi.Multi(tokenize_once=once),
    mooncake.NAME: lambda _, port: mooncake.Mooncake(
        bootstrap_port=port or ports.MOONCAKE_BOOTSTRAP
    ),
    offloading.NAME: lambda _, port: offloading.Offloading(peer_port=port or ports.OFFLOADING_P2P),
}

NAMES: Final = tuple(_MAKERS)
"""What `--connector` takes."""
COMING: Final = ("storage", "lmcache", "p2p-nccl")
"""What a pool may name and the sidecar cannot hand off by yet."""


class UnknownConnector(ValueError):
    """No such connector; the message says which there are."""


def check(name: str) -> str:
    """The name of a connector that can be made. Raises UnknownConnector."""
    if name in _MAKERS:
        return name
    what = f"{name!r} is not supported yet" if name in COMING else f"no connector {name!r}"
    raise UnknownConnector(f"{what}: use one of {', '.join(NAMES)}")


def make(name: str, *, tokenize_once: bool, peer_port: int | None) -> AnyConnector:
    """The connector of that name. Raises UnknownConnector.

    `peer_port`: where it asks a prefill pod; None: vLLM's default for it.
    """
    return _MAKERS[check(name)](tokenize_once, peer_port)
