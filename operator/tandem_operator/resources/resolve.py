"""From what a user wrote to a spec with every choice made.

The defaults here may change from release to release, so no schema holds them. A pool's
ControllerRevision pins them when it is created: upgrading the operator restarts no engine.
Defaults that never change stand in the CRD.

A stored spec may have inert fields: its other fields leave them without effect. The CRDs refuse
such a field when it is written, and admit it while it stays as it is: a user may switch
`inferencePool` off and on again under the same `gatewayRef`. To remove it later changes no pod, so
it is in no revision and in no compat hash.
"""

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Final

from tandem_contract import ports
from tandem_contract.connectors import ConnectorName
from tandem_contract.custom_resources import DECODE_POOL

from .schema import defaulted_spec
from .vllm_versions import LEASE as RENEWED_LEASE
from .vllm_versions import parse_release

VLLM_VERSION: Final = "0.32.0"
"""The vLLM version that pools get unless they choose one."""

LEASE: Final = "30s"
"""vLLM's own default. Decode engines renew the lease on a prompt's KV; with a shorter one, KV
expires before a decode engine with a long queue reads it, and the hand-off fails."""
LEASE_UNRENEWED: Final = "480s"
"""The lease for vLLM versions without renewal: it must outlast the longest decode queue."""

DATA_PORTS_FIRST: Final = 20_000
"""First of the ports at which UCX listens. The range lies below Linux' ephemeral ports (from
32768), so that no outgoing connection takes one of them, and above all other ports of a pod."""
DATA_PORTS: Final = 1_000
"""Size of that range. UCX listens on one port for each device and worker process: tens in a pod of
eight GPUs; with `tandem up`, all engines of the machine share the range."""

_TAG: Final = re.compile(r":v?(\d+\.\d+(?:\.\d+)?[^@]*)(?:@sha256:[0-9a-f]+)?$")


def image_version(image: str) -> str | None:
    """The version in an image's tag; None when the tag is no version."""
    match = _TAG.search(image)
    return match[1] if match else None


def own_version() -> str:
    """The version of this distribution, which is also the tag of its images."""
    return version("tandem-llm")


def other_version_hint(version: str) -> str:
    """What to do when torch engines of `version` fail; empty for this distribution's version.

    The operator writes the arguments and files that its own version of the engine reads.
    """
    if version == own_version():
        return ""
    return (
        f". engine.image is of version {version}, the operator of {own_version()}: an engine of"
        " another version may refuse an argument or a setting. Leave engine.image and"
        f" engine.version out, or take the image of version {own_version()}"
    )


@dataclass(frozen=True)
class Defaults:
    """Values for what a pool leaves out; an installation sets its own images here."""

    tandem_image: str = field(default_factory=lambda: f"tandem:{own_version()}")
    """Image of the sidecar, the EPP and the operator."""
    torch_image: str = field(default_factory=lambda: f"tandem-engine:{own_version()}")
    """Image of the torch engine. Its tag is replaced where a pool names another version."""
    vllm_repository: str = "vllm/vllm-openai"
    """Repository of vLLM's images; the tag is `v` and the version."""
    vllm_version: str = VLLM_VERSION
    pull_policy: str | None = None
    """imagePullPolicy of `tandem_image`; None leaves it to Kubernetes, which decides by the tag."""
    image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets, in the pools' namespaces, with which nodes pull the images of pools."""
    vllm_storage_image: str = field(default_factory=lambda: f"tandem-vllm-storage:{own_version()}")
    """Image of the init container that brings vLLM's storage connector."""
    assigned_users: bool = False
    """Whether the platform assigns user ids to pods, as OpenShift does; pods then name none."""
    pod_networks: tuple[str, ...] = (
        "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7",
    )  # fmt: skip
    """Networks (CIDR) that a sidecar accepts prefill pods from when another picker than Tandem's
    EPP chooses them. The default is all private ranges; set the cluster's own pod network."""


DEFAULTS: Final = Defaults()


def resolve(
    kind: str, name: str, user: Mapping[str, Any], defaults: Defaults = DEFAULTS
) -> dict[str, Any]:
    """The complete spec of pool `name`, from `user`: its valid spec with the inherited fields."""
    # The result is filled in place, and `user` may be a cached object.
    spec = deepcopy(dict(user))
    _resolve_model(spec["model"])
    _resolve_engine(spec.setdefault("engine", {}), defaults)
    _resolve_devices(spec)
    # After the engine: the lease depends on its type and version.
    transfer = spec.setdefault("transfer", {})
    transfer.setdefault("connector", ConnectorName.NIXL.value)
    transfer.setdefault("sideChannelPort", ports.SIDE_CHANNEL)
    if spec["engine"]["type"] == "vllm":
        transfer.setdefault("dataPorts", _data_ports(transfer["sideChannelPort"]))
    transfer.setdefault("leaseDuration", _lease(spec["engine"]))
    transfer.setdefault("loadFailurePolicy", "recompute")
    if kind == DECODE_POOL:
        spec.setdefault("routing", {}).setdefault("endpoint", name)
    return defaulted_spec(kind, spec)


def _resolve_model(model: dict[str, Any]) -> None:
    model.setdefault("servedNames", [model["name"]])


def _resolve_engine(engine: dict[str, Any], defaults: Defaults) -> None:
    kind = engine.setdefault("type", "vllm")
    # The image's own tag says which version it is, unless the user states one.
    tagged = image_version(engine.get("image", ""))
    default = tagged or (defaults.vllm_version if kind == "vllm" else own_version())
    release = engine.setdefault("version", default)
    if kind == "vllm":
        upstream = f"{defaults.vllm_repository}:v{release}"
    # An installation's own image is used as it is for the version that it was built for.
    elif release == own_version():
        upstream = defaults.torch_image
    else:
        upstream = f"{_untagged(defaults.torch_image)}:{release}"
    engine.setdefault("image", upstream)
    engine.setdefault("tuning", "auto")
    engine.setdefault("dtype", "auto")
    engine.setdefault("kvCacheDtype", "auto")


def _lease(engine: Mapping[str, Any]) -> str:
    release = parse_release(engine["version"]) if engine["type"] == "vllm" else None
    return LEASE if release is None or RENEWED_LEASE.includes(release) else LEASE_UNRENEWED


def _data_ports(side_channel: int) -> dict[str, int]:
    first = DATA_PORTS_FIRST
    # The side channels of a pod's ranks follow its first one: leave them all out.
    if first - DATA_PORTS < side_channel < first + DATA_PORTS:
        first = side_channel + DATA_PORTS
    return {"first": first, "last": first + DATA_PORTS - 1}


def _untagged(image: str) -> str:
    """An image without tag and digest; the port of a registry stays."""
    return re.sub(r"(:[^/:@]+)?(@.*)?$", "", image, count=1)


def _resolve_devices(spec: dict[str, Any]) -> None:
    """Derive accelerator.count from parallelism, or parallelism from it, where one is left out."""
    accelerator = spec.setdefault("accelerator", {})
    count = accelerator.get("count")
    if "parallelism" not in spec:
        spec["parallelism"] = {"tensor": count or 1}
    # The torch engine runs on the CPU unless a pool asks for a device.
    if count is None:
        sizes = spec["parallelism"]
        devices = sizes.get("tensor", 1) * sizes.get("pipeline", 1) * sizes.get("data", 1)
        accelerator["count"] = 0 if spec["engine"]["type"] == "torch" else devices


def without_inert_fields(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a spec with the schema's defaults, which need not be valid, without such fields."""
    kept = {
        name: dict(value) if isinstance(value, Mapping) else value for name, value in spec.items()
    }
    for section, name in _inert_fields(spec):
        kept.get(section, {}).pop(name, None)
    if "scaling" in kept:
        kept.pop("replicas", None)
    return kept


def _inert_fields(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Section and field, whether or not the spec has them."""
    source = spec.get("model", {}).get("source", {"huggingface": {}})
    if "huggingface" not in source:
        yield from (("model", "revision"), ("model", "cache"))
    if spec.get("engine", {}).get("type") == "torch":
        yield from (("engine", "kvCacheDtype"), ("engine", "gpuMemoryUtilization"))
    if not spec.get("parallelism", {}).get("expert"):
        yield "parallelism", "all2allBackend"
    if spec.get("transfer", {}).get("connector") != "multi":
        yield "transfer", "connectors"
    if not spec.get("routing", {}).get("inferencePool", {}).get("enabled"):
        yield "routing", "gatewayRef"
