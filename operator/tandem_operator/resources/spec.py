"""The custom resources' spec as types, every choice made: `resolve` has filled in the defaults.

A field that is None leaves the choice to the engine. Names are the CRD's, in snake case; the CRD's
descriptions say what each field means. Durations are seconds.
"""

from typing import Any, Final, Literal

import msgspec

from tandem_contract.durations import Seconds
from tandem_contract.paths import Role

from .spec_parts import EppChecks, HealthChecks, Transfer

SIDECAR: Final = "sidecar"
"""Name of the sidecar's container, by which a template replaces its image."""


class Section(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A mapping of the spec."""


class SecretKey(Section, frozen=True, kw_only=True):
    name: str
    key: str


class HuggingFaceSource(Section, frozen=True, kw_only=True):
    repository: str | None = None
    token_secret_ref: SecretKey | None = None


class ClaimSource(Section, frozen=True, kw_only=True):
    claim_name: str
    path: str | None = None


class OciSource(Section, frozen=True, kw_only=True):
    reference: str
    path: str | None = None
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None


class SecretName(Section, frozen=True, kw_only=True):
    name: str


class S3Source(Section, frozen=True, kw_only=True):
    uri: str
    endpoint: str | None = None
    region: str | None = None
    credentials_secret_ref: SecretName | None = None


class TinySource(Section, frozen=True, kw_only=True):
    seed: int


class ModelSource(Section, frozen=True, kw_only=True):
    """At most one field is given. None: a Hugging Face repository with the model's name."""

    huggingface: HuggingFaceSource | None = None
    pvc: ClaimSource | None = None
    oci: OciSource | None = None
    s3: S3Source | None = None
    path: str | None = None
    tiny: TinySource | None = None


class LoraAdapter(Section, frozen=True, kw_only=True):
    name: str
    path: str


class ModelCache(Section, frozen=True, kw_only=True):
    claim_name: str
    pre_pull: bool = False


class ModelSpec(Section, frozen=True, kw_only=True):
    name: str
    source: ModelSource = ModelSource()
    cache: ModelCache | None = None
    revision: str | None = None
    served_names: tuple[str, ...]
    lora_adapters: tuple[LoraAdapter, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may give as `model`: the served names, then the adapters'."""
        return (*self.served_names, *(adapter.name for adapter in self.lora_adapters))


class Resources(Section, frozen=True, kw_only=True):
    """Name of a resource → quantity, as in a container's `resources`."""

    requests: dict[str, int | str] = {}
    limits: dict[str, int | str] = {}


class EngineSpec(Section, frozen=True, kw_only=True):
    type: Literal["vllm", "torch"]
    version: str
    image: str
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    tuning: Literal["auto", "off"]
    dtype: str
    kv_cache_dtype: str
    block_size: int | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    resources: Resources = Resources()
    extra_args: tuple[str, ...] = ()
    env: tuple[dict[str, Any], ...] = ()
    """EnvVars, as in a container."""
    env_from: tuple[dict[str, Any], ...] = ()
    """EnvFromSources, as in a container."""


class Parallelism(Section, frozen=True, kw_only=True):
    tensor: int
    pipeline: int
    data: int
    expert: bool
    all2all_backend: str | None = None
    nodes: int


class Accelerator(Section, frozen=True, kw_only=True):
    resource: str
    count: int
    type: str | None = None
    node_selector: dict[str, str] = {}
    tolerations: tuple[dict[str, Any], ...] = ()
    """Tolerations, as in a Pod."""


class Slo(Section, frozen=True, kw_only=True):
    ttft: Seconds | None = None
    itl: Seconds | None = None


class Ratio(Section, frozen=True, kw_only=True):
    min: float | None = None
    max: float | None = None


class ScaleToZero(Section, frozen=True, kw_only=True):
    enabled: bool
    idle_after: Seconds | None = None


class Scaling(Section, frozen=True, kw_only=True):
    min_replicas: int
    max_replicas: int
    slo: Slo = Slo()
    ratio: Ratio = Ratio()
    gpu_budget: int | None = None
    scale_to_zero: ScaleToZero | None = None


class Rollout(Section, frozen=True, kw_only=True):
    max_surge: int | str | None = None
    max_unavailable: int | str | None = None
    min_ready_seconds: int | None = None
    progress_deadline: Seconds | None = None


class Drain(Section, frozen=True, kw_only=True):
    timeout: Seconds


class Placement(Section, frozen=True, kw_only=True):
    topology_key: str


class Template(Section, frozen=True, kw_only=True):
    """A part of a Pod, merged over the rendered one."""

    metadata: dict[str, Any] = {}
    spec: dict[str, Any] = {}


class PoolSpec(Section, frozen=True, kw_only=True):
    """The fields of both kinds."""

    model: ModelSpec
    engine: EngineSpec
    parallelism: Parallelism
    accelerator: Accelerator
    transfer: Transfer
    replicas: int | None = None
    scaling: Scaling | None = None
    rollout: Rollout = Rollout()
    drain: Drain
    health_checks: HealthChecks = HealthChecks()
    placement: Placement | None = None
    image_pull_secrets: tuple[SecretName, ...] = ()
    paused: bool
    template: Template = Template()

    @property
    def initial_replicas(self) -> int:
        """Number of pods of a new pool: `scaling.minReplicas`, else `replicas`, else 1."""
        # `replicas` may be a leftover beside `scaling`: the CRD admits it while it does not change.
        if self.scaling is not None:
            return self.scaling.min_replicas
        return 1 if self.replicas is None else self.replicas


class PrefillSpec(PoolSpec, frozen=True, kw_only=True):
    """The spec of a PrefillPool."""


class PrefillRef(Section, frozen=True, kw_only=True):
    name: str


class Sidecar(Section, frozen=True, kw_only=True):
    prefill_timeout: Seconds
    kv_transfer_timeout: Seconds
    fallback_to_unified: bool
    retries: int
    breaker_failures: int | None = None
    breaker_cooldown: Seconds | None = None
    stream_kv: bool | None = None


class RouterProgram(Section, frozen=True, kw_only=True):
    """The EPP or Envoy of an endpoint; what is left out is the installation's."""

    enabled: bool
    image: str | None = None
    env: tuple[dict[str, Any], ...] = ()
    """EnvVars, as in a container."""
    env_from: tuple[dict[str, Any], ...] = ()
    """EnvFromSources, as in a container."""


class EppSpec(RouterProgram, frozen=True, kw_only=True):
    replicas: int | None = None
    config: dict[str, Any] | None = None
    health_checks: EppChecks = EppChecks()


class Switch(Section, frozen=True, kw_only=True):
    enabled: bool


class EnvoySpec(RouterProgram, frozen=True, kw_only=True):
    api_key_secret_ref: SecretName | None = None


class PathMatch(Section, frozen=True, kw_only=True):
    type: Literal["PathPrefix", "Exact"]
    value: str


class HeaderMatch(Section, frozen=True, kw_only=True):
    name: str
    value: str


class RouteMatch(Section, frozen=True, kw_only=True):
    path: PathMatch | None = None
    headers: tuple[HeaderMatch, ...] = ()


class GatewayRef(Section, frozen=True, kw_only=True):
    name: str
    namespace: str | None = None
    section_name: str | None = None
    hostnames: tuple[str, ...] = ()
    matches: tuple[RouteMatch, ...] = ()


class RoutingTls(Section, frozen=True, kw_only=True):
    secret_name: str


class RoutingService(Section, frozen=True, kw_only=True):
    """The Service that clients use."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] | None = None
    annotations: dict[str, str] = {}


class RouterPodMetadata(Section, frozen=True, kw_only=True):
    """Of the pods of EPP and Envoy."""

    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Resume(Section, frozen=True, kw_only=True):
    enabled: Literal["auto", "always", "never"]
    max_regeneration: Seconds
    max_moves: int


class FlowBand(Section, frozen=True, kw_only=True):
    priority: int
    ttl: Seconds | None = None
    max_requests: int | None = None


class FlowClient(Section, frozen=True, kw_only=True):
    name: str
    priority: int = 0
    tenant: str = ""


class FlowControl(Section, frozen=True, kw_only=True):
    enabled: bool
    ttl: Seconds
    no_endpoint_ttl: Seconds = msgspec.field(name="noEndpointTTL")
    max_requests: int
    max_bytes: int
    fairness: Literal["requests", "tokens"]
    order: Literal["arrival", "deadline"]
    displace: bool
    propagate_priority: bool = False
    bands: tuple[FlowBand, ...] = ()
    clients: tuple[FlowClient, ...] = ()


class RoutingSlo(Section, frozen=True, kw_only=True):
    """At least one of the two times is given."""

    ttft: Seconds | None = None
    itl: Seconds | None = None
    attainment: float


class Routing(Section, frozen=True, kw_only=True):
    endpoint: str
    front: Literal["envoy", "router"]
    epp: EppSpec
    envoy: EnvoySpec
    node_selector: dict[str, str] = {}
    """Of the pods of EPP and Envoy, as are the next two."""
    tolerations: tuple[dict[str, Any], ...] = ()
    image_pull_secrets: tuple[SecretName, ...] = ()
    inference_pool: Switch
    gateway_ref: GatewayRef | None = None
    tls: RoutingTls | None = None
    api_paths: tuple[str, ...] = ()
    max_request_bytes: int | None = None
    service: RoutingService | None = None
    pod_metadata: RouterPodMetadata | None = None
    split: Literal["always", "auto", "off"]
    max_prefill_on_decode: int | None = None
    resume: Resume | None = None
    flow_control: FlowControl | None = None
    slo: RoutingSlo | None = None


class DecodeSpec(PoolSpec, frozen=True, kw_only=True):
    """The spec of a DecodePool, with the fields that it inherits."""

    prefill_ref: PrefillRef | None = None
    role: Role
    sidecar: Sidecar
    routing: Routing
