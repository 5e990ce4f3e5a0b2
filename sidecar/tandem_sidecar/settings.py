"""What the command line decides, as one value."""

from dataclasses import dataclass, field

import msgspec

from tandem_contract.commandline import HostPort

from .http.server import Limits
from .observability.logs import LogFormat
from .security.credentials import Tls
from .security.route import AllowList


class Policy(msgspec.Struct, frozen=True, gc=False):
    """What a request gets when its prefill and decode cannot run on two engines."""

    fallback_to_unified: bool = True
    """True: the decode engine computes the prompt itself. False: the client gets an error."""


@dataclass(frozen=True, slots=True)
class Breaker:
    """When a prefill pod is left alone, and for how long (seconds)."""

    failures: int = 5
    """In a row. Too low: one hiccup sends its load to the others."""
    cooldown: float = 5.0
    """Then one request is let through to probe. Too long: a pod that came back stays idle."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Times in seconds. What `reloadable` names may change while requests run."""

    listen: HostPort
    admin: HostPort
    engine: HostPort
    """The decode engine of this pod."""
    connector: str = "nixl"
    peer_port: int | None = None
    """Where a connector asks the prefill pod; None: the connector's own default."""
    policy: Policy = field(default_factory=Policy)
    limits: Limits = field(default_factory=Limits)
    allow: AllowList = field(default_factory=AllowList)
    breaker: Breaker = field(default_factory=Breaker)
    tls: Tls = field(default_factory=Tls)
    pod_name: str = ""
    """This pod's name in headers and metrics; empty: the plan's name for it, else the address."""
    prefill_timeout: float = 30.0
    """All prefill attempts of a request together. Too low: fallbacks under load."""
    prefill_grace: float = 1.0
    """A prefill that nobody waits for any more may take this long to end before it is aborted. Too
    low: KV of clients that left waits for its lease. Too high: prefills are computed for nobody."""
    kv_transfer_timeout: float = 10.0
    """A release call. The pull itself is the decode engine's, and so is its time limit: from here
    a slow pull looks like a long queue."""
    push_timeout: float = 300.0
    """A pushed hand-off without a first byte from decode this long is computed here: its KV never
    comes. Too low: answers that take long to make as a whole are made twice."""
    silence_timeout: float = 10.0
    """An engine that is silent on a leg and whose `/health` stays without answer this long is taken
    for hung. Too low: a busy engine's requests are given up; a vLLM short of CPU is silent for
    seconds. Twice this and a prefill timeout of 30 s leave time for another pod."""
    drain_timeout: float = 120.0
    """What runs when a drain begins gets this long."""
    retries: int = 2
    """Prefill pods asked after the first."""
    tokenize_once: bool = True
    """Hand the prefill's token ids to the decode engine, where both can."""
    workers: int = 1
    """Processes that serve; one more watches them when there are several."""
    history: int = 2048
    """Ended requests kept for `tandem trace`, per process."""
    log_format: LogFormat = LogFormat.TEXT
    log_level: str = "info"
    otlp_endpoint: str = ""
    """Where spans go (OTLP over HTTP); empty: nowhere."""
