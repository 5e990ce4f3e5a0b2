"""A Pod as types, with everything resolved that the kubelet resolves; made by `pod_parser`."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class HttpGet:
    """`GET path`; a status of 200 to 399 is success."""

    host: str
    port: int
    path: str = "/"
    scheme: str = "http"
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class TcpSocket:
    """A TCP connection; success if it is accepted."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Exec:
    """A command with the container's environment; exit code 0 is success."""

    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sleep:
    """A pause (preStop only)."""

    seconds: float


Handler = HttpGet | TcpSocket | Exec | Sleep


@dataclass(frozen=True, slots=True)
class Probe:
    """A handler that is run repeatedly; Kubernetes' fields and defaults, times in seconds."""

    handler: Handler
    period: float = 10.0
    timeout: float = 1.0
    initial_delay: float = 0.0
    failure_threshold: int = 3
    success_threshold: int = 1


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """One container, ready to be run."""

    name: str
    image: str
    command: tuple[str, ...]
    """Command and args; args alone when the Pod names no command."""
    has_command: bool = True
    env: dict[str, str] = field(default_factory=dict)
    working_dir: str | None = None
    ports: tuple[int, ...] = ()
    resources: dict[str, int] = field(default_factory=dict)
    """Limits on extended resources: name → count."""
    startup: Probe | None = None
    readiness: Probe | None = None
    liveness: Probe | None = None
    pre_stop: Handler | None = None
    restarts: bool = True
    """Whether the runner restarts it in place when it ends."""


@dataclass(frozen=True, slots=True)
class PodSpec:
    """One pod, ready to be run. Init containers run first, in order; sidecars keep running."""

    name: str
    labels: Mapping[str, str]
    address: str
    containers: tuple[ContainerSpec, ...]
    init: tuple[tuple[ContainerSpec, bool], ...] = ()
    """Init containers in order, each with whether it is a sidecar (restartPolicy Always)."""
    grace: float = 30.0
    """terminationGracePeriodSeconds."""

    @property
    def all_containers(self) -> tuple[ContainerSpec, ...]:
        """All containers, init containers first."""
        return (*(spec for spec, _ in self.init), *self.containers)
