"""Connects the decisions of one process with those of its replicas.

    sharing = share(decisions, PeerSettings(peers=...), keys)
    async with sharing.channel.running(): ...

The EPP shares with its other pods, and a router's worker with the other workers of its port.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from .decisions import Decisions
from .peers.channel import PeerChannel, PeerSettings
from .peers.metrics import PeerMetrics
from .peers.turns import Turns
from .shared_fleet import SharedFleet
from .turn_taking import TurnMetrics, TurnTaker


@dataclass(frozen=True)
class Sharing:
    """What replicas share, and how."""

    fleet: SharedFleet
    channel: PeerChannel
    turns: TurnTaker | None
    """None: there is one replica."""


def share(decisions: Decisions, settings: PeerSettings, keys: Mapping[str, bytes]) -> Sharing:
    """Have `decisions` tell the replicas of `settings` what they place, and learn what those do.

    `keys`: by which replicas authenticate each other. Nothing listens yet.
    """
    registry, shared = decisions.metrics.registry, SharedFleet(decisions.fleet)
    channel = PeerChannel(settings, shared, PeerMetrics(registry))
    channel.use_keys(keys)
    # Without peers too: it tells which entries of an access log count.
    decisions.picker.observer = shared
    if not settings.peers:
        return Sharing(shared, channel, None)
    shared.publisher = channel
    shared.turns = turns = Turns(channel, asyncio.get_running_loop().call_later)
    taker = TurnTaker(decisions.fleet, channel, turns, TurnMetrics(registry))
    return Sharing(shared, channel, taker)
