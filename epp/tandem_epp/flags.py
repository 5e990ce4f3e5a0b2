"""Flags of what decides where requests go: `tandem-epp`, and `tandem-router`."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from tandem_contract.commandline import DIRECTORY, HOST_PORT

from .settings import Settings

F = TypeVar("F", bound=Callable[..., Any])

_FLAGS: Final = (
    click.option(
        "--discovery",
        type=click.Choice(["static", "kubernetes"]),
        default="static",
        help="Where backends come from: the list in --config, or the pods of a cluster, watched. "
        "The cluster is the one this process runs in, else that of KUBECONFIG or ~/.kube/config.",
    ),
    click.option("--namespace", help="With --discovery kubernetes: the namespace of the pods."),
    click.option(
        "--endpoint",
        help="With --discovery kubernetes: select the pods of this routing endpoint of the "
        "operator.",
    ),
    click.option(
        "--plan-key-dir",
        type=DIRECTORY,
        help="Directory of keys to sign plans with, one file each, which the sidecars have, too; "
        "reloaded when it changes. Without keys sidecars get prefill candidates of an EPP and no "
        "plan; a router needs keys for --discovery kubernetes, and has no use for them otherwise.",
    ),
    click.option(
        "--mutual-tls",
        type=DIRECTORY,
        help="Directory of ca.crt, tls.crt and tls.key: mutual TLS with the sidecars, and with the "
        "Envoy before an EPP; reloaded.",
    ),
    click.option(
        "--peers",
        type=HOST_PORT,
        multiple=True,
        default=Settings.peers,
        help="HOST:PORT of the replicas of this process; may be repeated. Each address that HOST "
        "resolves to is a replica, so the name of a headless Service is enough. They tell each "
        "other what they place, and authenticate each other by the plan keys. Default: it is the "
        "only one.",
    ),
    click.option(
        "--peer-listen",
        type=HOST_PORT,
        default=str(Settings.peer_listen),
        help="With --peers: address on which the other replicas connect.",
    ),
    click.option(
        "--warm-up/--no-warm-up",
        default=Settings.warm_up,
        help="Have each pair of prefill and decode backends make a tiny hand-off when they first "
        "meet, so that no request waits for the handshake of their engines.",
    ),
)


def deciding_flags(function: F) -> F:
    """Decorate a command's function with these flags."""
    # As decorators that stand below each other, whose first one is applied last.
    for flag in reversed(_FLAGS):
        function = flag(function)
    return function
