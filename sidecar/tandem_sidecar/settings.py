"""The sidecar's settings and their defaults. The flags of `main` take their defaults from here."""

from dataclasses import dataclass, field

import msgspec

from tandem_contract import endpoints, ports
from tandem_contract.api_paths import ApiPaths
from tandem_contract.commandline import HostPort
from tandem_contract.connectors import ConnectorName
from tandem_contract.plan import ResumeLimits
from tandem_http1.client import Limits

from .observability.logs import LogFormat
from .security.credentials import ListenTls, Tls
from .security.route import AllowList

_LISTEN = HostPort("0.0.0.0", ports.SIDECAR)
_ADMIN = HostPort("0.0.0.0", ports.SIDECAR_ADMIN)
_ENGINE = HostPort("127.0.0.1", ports.ENGINE_DECODE)


class Policy(msgspec.Struct, frozen=True, gc=False):
    """The handling of requests whose prefill and decode cannot run on two engines."""

    fallback_to_unified: bool = True
    """True: the decode engine computes the prompt itself. False: the client gets an error."""


@dataclass(frozen=True, slots=True)
class Breaker:
    """The circuit breaker of each prefill pod."""

    failures: int = 5
    """Failures in a row that open it. Too low: one hiccup moves a pod's load to the others."""
    cooldown: float = 5.0
    """Seconds that it stays open before one request probes the pod. Too long: a pod that works
    again stays idle."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a request that another engine can go on with waits for a silent one
    (`handoff.liveness`). To leave an engine that was only slow costs a recompute, and nothing that
    the client sees. No wait is longer than `Settings.silence_timeout`."""

    silence: float = 2.0
    """Seconds without a byte after which the engine's `/health` is requested. Too low: a probe for
    each long prompt."""
    answer: float = 1.0
    """Seconds for its answer. Too low: streams leave engines that are only busy. A vLLM that cannot
    keep up answers within 0.26 s (`benchmarks.health`)."""


@dataclass(frozen=True, slots=True)
class HealthChecks:
    """How the sidecar checks its engine; by the last checks it is ready or not."""

    path: str = endpoints.HEALTH
    """Path of the engine that answers 200 while it is healthy."""
    interval: float = 2.0
    """Seconds between two checks of a healthy engine. Too long: readiness is out of date."""
    timeout: float = 5.0
    """Seconds for an answer, of which ten in a row may be late. Too short: a busy engine makes the
    pod unready."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of a sidecar; times in seconds.

    `process.reload.LIVE` names the flags whose settings may change while requests run.
    """

    listen: HostPort = _LISTEN
    """Address that clients (Envoy) connect to."""
    admin: HostPort = _ADMIN
    """Address of the admin port."""
    engine: HostPort = _ENGINE
    """Address of this pod's decode engine, or of its rank 0."""
    ranks: int = 1
    """Data-parallel ranks with an engine port of their own. Rank r is served on the port of
    `listen` plus r, by the port of `engine` plus r."""
    connector: str = ConnectorName.NIXL.value
    peer_port: int | None = None
    """Port on which a connector queries the prefill pod; None: the connector's own default."""
    policy: Policy = field(default_factory=Policy)
    limits: Limits = field(default_factory=Limits)
    allow: AllowList = field(default_factory=AllowList)
    api: ApiPaths = field(default_factory=ApiPaths)
    """The paths that clients may request of the engine. Too many: clients reach what only an
    operator should, such as adapters, caches and profiles."""
    breaker: Breaker = field(default_factory=Breaker)
    health: HealthChecks = field(default_factory=HealthChecks)
    max_model_len: int | None = None
    """Tokens of the longest prompt that the engine takes, while its list of models does not say so;
    None: the engine decides. Too low: prompts that fit are refused."""
    tls: Tls = field(default_factory=Tls)
    listen_tls: ListenTls | None = None
    """TLS for clients; None: plain TCP."""
    pod_name: str = ""
    """This pod's name in headers, metrics and plans; empty: its name in the plan, else its address.
    Without it a sidecar behind a translated address takes plans for those of another pod."""
    used_plans: int | None = None
    """File descriptor of the table that the workers of a supervisor share (`UsedPlans`)."""
    prefill_timeout: float = 30.0
    """Seconds that all prefill attempts of a request may take together; a timeout in its signed
    plan takes precedence. Too low: fallbacks under load."""
    prefill_grace: float = 1.0
    """Seconds in which a prefill whose client left may still finish, before it is aborted. Too low:
    the KV of such prefills stays allocated until its lease expires. Too high: prefill pods compute
    prompts whose answer no client receives."""
    kv_transfer_timeout: float = 10.0
    """Seconds for a KV transfer, where the engine's metrics tell that it has not ended
    (`handoff.transfer_monitor`; not with more than one worker); and for a request that releases
    KV. A timeout in the signed plan takes precedence. Too low: prompts whose KV is on its way are
    computed again."""
    push_timeout: float = 300.0
    """Seconds without output of the decode engine after which the KV of a pushed hand-off is given
    up and the decode engine computes the prompt. Too low: long answers that are not streamed are
    computed twice."""
    silence_timeout: float = 10.0
    """Seconds without a byte on a leg after which the engine's `/health` is requested; without an
    answer for as long again, the engine counts as hung. Too low: requests to a busy engine are
    given up, as a vLLM short of CPU is silent for seconds. Twice the default leaves a third of the
    default prefill timeout for another pod."""
    drain_timeout: float = 120.0
    """Seconds that running requests get when a drain begins."""
    retries: int = 2
    """Prefill pods tried after the first one failed."""
    sample_prefillers: bool = False
    """Try the prefill pods of an unsigned header in random order instead of the header's."""
    tokenize_once: bool = True
    """Pass the token ids of a chat from the prefill's answer to the decode engine, if both engines
    can."""
    stream_kv: bool = True
    """Send both legs at once where both engines can, so that KV moves while the prefill computes.
    A decode engine keeps blocks for the prompt from then on."""
    resume: bool = False
    """Whether a stream whose decode engine fails goes on at another one, where that is exact (see
    `resume.rules`): the router's choice, or a pod that the plan names as an alternate. In a sidecar
    a plan can ask for it, too."""
    resume_max_regeneration: float = ResumeLimits().max_regeneration
    """Seconds for which another engine may generate again what a stream has delivered, estimated by
    how long the first took; a stream with more ends with an error. Its client gets nothing
    meanwhile. Only for streams that are not continued by token ids (see `resume.rules`). Too high:
    a few long answers keep an engine busy with what their clients have."""
    resume_patience: Patience = field(default_factory=Patience)
    """It has no flag: what bounds it from below is the time of an engine's answer to a probe."""
    resume_max_moves: int = ResumeLimits().max_moves
    """Other engines that such a stream is given to after failures. The router's file states it, or
    a plan; it has no flag."""
    workers: int = 1
    """Processes that serve. With more than one, another process supervises them."""
    history: int = 2048
    """Ended requests that each process remembers for `tandem trace`."""
    log_format: LogFormat = LogFormat.TEXT
    log_level: str = "info"
    spans: bool = True
    """Whether spans are sent if a collector is named."""
    otlp_endpoint: str = ""
    """URL of the OpenTelemetry collector; empty: the environment may name one, else no spans are
    sent. By gRPC or HTTP, see `tandem_contract.otlp`."""

    @property
    def resume_limits(self) -> ResumeLimits | None:
        """Of a stream whose plan states none; None: it ends with its engine."""
        if not self.resume:
            return None
        return ResumeLimits(self.resume_max_regeneration, self.resume_max_moves)

    def engine_of(self, rank: int) -> HostPort:
        """Address of the engine of a data-parallel rank. Raises ValueError if there is none."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"the pod serves no data-parallel rank {rank}")
        return self.engine._replace(port=self.engine.port + rank)

    def backend_name(self, engine: HostPort) -> str:
        """The name that an EPP has for one of this pod's engines; empty without `pod_name`, unless
        the pod has several."""
        if self.ranks == 1:
            return self.pod_name
        return f"{self.pod_name}-rank-{engine.port - self.engine.port}"
