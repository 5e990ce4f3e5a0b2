"""What the command line decides, as one value."""

from dataclasses import dataclass, field

from tandem_contract.commandline import HostPort

from .handoff.machine import Policy
from .http.server import Limits
from .trust.route import AllowList


@dataclass(frozen=True, slots=True)
class Settings:
    """Times in seconds."""

    listen: HostPort
    admin: HostPort
    engine: HostPort
    """The decode engine of this pod."""
    policy: Policy = field(default_factory=Policy)
    limits: Limits = field(default_factory=Limits)
    allow: AllowList = field(default_factory=AllowList)
    pod_name: str = ""
    """This pod's name in headers and metrics; empty: the plan's name for it, else the address."""
    prefill_timeout: float = 30.0
    """All prefill attempts of a request together. Too low: fallbacks under load."""
    kv_transfer_timeout: float = 10.0
    """A release call. The pull itself is the decode engine's, and so is its time limit: from here
    a slow pull looks like a long queue."""
    drain_timeout: float = 120.0
    """What runs when a drain begins gets this long."""
    retries: int = 2
    """Prefill pods asked after the first."""
