"""Metrics of the channel between replicas."""

from collections.abc import Callable, Iterable
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem_contract import metrics as names

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class PeerState(StrEnum):
    """State of the connection to one address; label values."""

    CONNECTED = "connected"
    CONNECTING = "connecting"
    REFUSED = "refused"
    """One side refuses the other: other plan keys or another version."""


class OffReason(StrEnum):
    """Why the channel is off; label values."""

    NO_KEYS = "no_keys"
    NO_PEERS = "no_peers"


class PeerMetrics(Collector):
    """Counts what the channel does."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.states: Callable[[], Iterable[PeerState]] = lambda: ()
        """The state of each address that this replica connects to."""
        self.off_reason: Callable[[], OffReason | None] = lambda: OffReason.NO_PEERS
        self.sent = Counter(
            "tandem_epp_peer_events_sent_total",
            "Placements, ends, learned figures, ejections and prefixes sent to other replicas of "
            "this EPP; each counts once per replica.",
            registry=registry,
        )
        self.received = Counter(
            "tandem_epp_peer_events_received_total",
            "Events received from other replicas of this EPP, by result: applied; old (came "
            "before); gap (an earlier one is missing, a snapshot follows); unknown (of a newer "
            "version).",
            ("result",),
            registry=registry,
        )
        self.dropped = Counter(
            "tandem_epp_peer_events_dropped_total",
            "Events dropped because the queue of a replica was full; it then gets a snapshot.",
            registry=registry,
        )
        self.refused = Counter(
            "tandem_epp_peer_refused_total",
            "Connections between replicas that ended for a reason of trust: no_keys, other_keys, "
            "wrong_proof, wrong_mac, version, malformed, too_many, refused (by the other side).",
            ("reason",),
            registry=registry,
        )
        self.lag = Histogram(
            "tandem_epp_peer_lag_seconds",
            "Seconds from the first event of a batch to the acknowledgement of another replica, by "
            "this replica's clock.",
            buckets=_SECONDS,
            registry=registry,
        )
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        peers = GaugeMetricFamily(
            names.EPP_PEERS,
            "Other replicas of this EPP by the state of the connection to them: connected; "
            "connecting; refused (other plan keys or another version).",
            labels=("state",),
        )
        states = list(self.states())
        for state in PeerState:
            peers.add_metric((state,), states.count(state))
        off = GaugeMetricFamily(
            "tandem_epp_peer_channel_off",
            "1 for the reason why this EPP does not exchange its knowledge with other replicas: "
            "no_keys (no plan keys), no_peers (--peers is not set). All 0: the channel is on.",
            labels=("reason",),
        )
        for reason in OffReason:
            off.add_metric((reason,), self.off_reason() is reason)
        return (peers, off)
