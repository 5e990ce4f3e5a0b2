"""Settings of the process. The flags take their defaults from the fields of `Settings`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tandem_contract import ports
from tandem_contract.commandline import HostPort

from .backends.inference_pool import PoolName, PoolReference
from .backends.pod_backend import PodSelection
from .replicas.peers.channel import PeerSettings
from .server.ext_proc.body_deadlines import BODY_SECONDS
from .server.http2.tls import TlsSettings

_LISTEN: Final = HostPort("0.0.0.0", ports.EPP_GRPC)
_HEALTH: Final = HostPort("0.0.0.0", ports.EPP_HEALTH)
_METRICS: Final = HostPort("0.0.0.0", ports.EPP_METRICS)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of an EPP process, from its command line."""

    config: Path | None
    """Router configuration file; None: `config_text` has its content."""
    config_text: str = ""
    """The configuration itself, where there is no file; empty: defaults."""
    listen: HostPort = _LISTEN
    """Address of the gRPC server that Envoy connects to."""
    ext_proc_server: str = "http2"
    """Which server answers Envoy: `http2`, this project's own, or `grpcio`. Both give the same
    answers; grpcio takes several times the CPU."""
    tls: TlsSettings | None = None
    """TLS of that server, for `http2` only; None: clear text, which Envoy's configuration by the
    operator expects."""
    mutual_tls: Path | None = None
    """Directory of ca.crt, tls.crt and tls.key with which the EPP calls sidecars by https; None: in
    clear text. With it, `tls` is mutual by the same files."""
    health: HostPort = _HEALTH
    """Address of /healthz and /readyz, and of gRPC's health service."""
    metrics: HostPort = _METRICS
    """Address of /metrics, /requests/ID, /debug/decisions and /debug/pods."""
    metrics_tls: TlsSettings | None = None
    """TLS of that address; None: clear text."""
    authorize_metrics: bool = False
    """Whether that address answers only those whose token the cluster's API server allows to read
    the page."""
    drain_timeout: float = 0.0
    """Seconds after SIGTERM for which the EPP, no longer ready, still answers requests, because
    gateways notice only later that it leaves. The operator's pods wait in a preStop hook."""
    api_path: tuple[str, ...] = ()
    """Paths of the engines that clients may request, beside the inference API's and those that the
    configuration file adds. A path too many lets clients reach what engines serve to operators."""
    plan_key_dir: Path | None = None
    """Directory of plan keys; None: sidecars get prefill candidates and no signed plan."""
    max_body: int = 16 << 20
    """Bytes; a larger request body is answered with 413. Too low: long prompts are refused. Too
    high: each request under way may hold that much memory while its body is collected."""
    held_bytes: int | None = None
    """Bytes that may be held for all clients together: request bodies that arrive, answers that
    wait for a gateway, and 8 KiB for each stream. Beyond it bodies are answered with 503. None: a
    quarter of the container's memory, at most 512 MiB. Too low: bursts of long prompts are refused;
    too high: they end the process for want of memory."""
    body_timeout: float = BODY_SECONDS
    """Seconds for a request's body to arrive, after which it is answered with 408. Too low: clients
    with a slow line are refused. Too high: stalled uploads keep memory from others for long."""
    history: int = 4096
    """Decisions kept for `tandem trace`, about 1 KB each; 0 keeps none."""
    otlp_endpoint: str = ""
    """URL of an OpenTelemetry collector; empty: its environment variables name one, or none."""
    tracing: bool = True
    """Whether spans are exported if a collector is named."""
    warm_up: bool = True
    """Whether each pair of pods makes its first hand-off before a request needs it. False: the
    first request of a pair waits for the handshake, up to seconds."""
    log_level: str = "info"
    """debug, info, warning or error; debug logs one line per decision."""
    log_json: bool = False
    """Whether a line of the log is a JSON object."""
    subset_hints: bool = True
    """Whether a gateway's list of allowed backends is followed."""
    feature_gates: Mapping[str, bool] = field(default_factory=dict)
    """llm-d's feature gates that the command line sets, and whether they are on: the
    configuration's entries of these gates do not count."""
    peers: tuple[HostPort, ...] = ()
    """Names or addresses of all replicas of this EPP; empty: it is the only one."""
    peer_listen: HostPort = PeerSettings.listen
    """Address on which this replica listens for the others."""
    pods: PodSelection | PoolReference | None = None
    """The pods of a cluster that are the backends, selected by label or by an InferencePool; None:
    the configuration file lists them."""

    inference_pool: str = ""
    """Name of an InferencePool in the namespace of pods that are selected by label: objects that
    refer to it, such as InferenceModelRewrite, apply to their requests; empty: there is none."""

    @property
    def pool_name(self) -> PoolName | None:
        """The InferencePool of the backends, as other objects refer to it; None: there is none."""
        if isinstance(self.pods, PoolReference):
            return self.pods.full_name
        if self.pods is None or not self.inference_pool:
            return None
        return PoolName(self.pods.namespace, self.inference_pool)

    @property
    def lists_backends(self) -> bool:
        """Whether the configuration file lists the backends (static discovery)."""
        return self.pods is None
