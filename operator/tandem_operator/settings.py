"""The operator's settings and their defaults. The flags of `main` take their defaults from here."""

from dataclasses import dataclass, field
from typing import Final

from tandem_contract import ports
from tandem_contract.commandline import HostPort

from .runtime.controller import Scope
from .runtime.leader import LeaseTimes

_HEALTH: Final = HostPort("0.0.0.0", ports.OPERATOR_HEALTH)
_METRICS: Final = HostPort("0.0.0.0", ports.OPERATOR_METRICS)

MIN_LEASE_DURATION: Final = 3.0
"""Seconds. Renewing a shorter Lease would leave no time for a single slow call to the API
server."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of one replica of the operator; times in seconds."""

    scope: Scope = field(default_factory=Scope)
    """Which pools the leader reconciles, and with which defaults."""
    health: HostPort = _HEALTH
    """Address of /healthz and /readyz. All interfaces, because the kubelet calls the pod's address.
    On another port than the Deployment's probes use, the kubelet restarts the container again and
    again."""
    metrics: HostPort = _METRICS
    """Address of /metrics. All interfaces, because Prometheus scrapes the pod's address. On another
    port than the PodMonitor's, the alert TandemOperatorNotLeading fires."""
    leader_elect: bool = True
    """Whether the replica reconciles only while it holds the Lease. False: the user makes sure that
    no other replica runs; two replicas would write at the same time."""
    lease_namespace: str | None = None
    """Namespace of the Lease; None: the namespace of the pod, or of the kubeconfig's context.
    Replicas with different namespaces do not exclude each other."""
    lease_times: LeaseTimes = field(default_factory=LeaseTimes)
    log_level: str = "info"
    """debug, info, warning or error."""
