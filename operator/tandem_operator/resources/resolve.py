"""From what a user wrote to a spec with every choice made.

These are the defaults that may change from release to release, which is why no schema holds them;
a revision pins them when it is made, so that upgrading the operator restarts no engine. The
defaults that never change are the CRD's.
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Final

from tandem_contract import ports

from ..crd import DECODE_POOL
from .schema import defaulted_spec
from .versions import LEASE as LEASED
from .versions import release

VLLM_VERSION: Final = "0.32.0"
"""The vLLM this release's command lines and hand-offs are made for."""

LEASE: Final = "30s"
"""vLLM's own lease, which decode pods renew. Shorter loses hand-offs when decode queues."""
LEASE_UNRENEWED: Final = "480s"
"""The same where nobody renews it: it has to outlast the longest queue."""

_TAG: Final = re.compile(r":v?(\d+\.\d+(?:\.\d+)?[^@]*)(?:@sha256:[0-9a-f]+)?$")


def image_version(image: str) -> str | None:
    """The version in an image's tag; None when the tag is none."""
    match = _TAG.search(image)
    return match[1] if match else None


def own_version() -> str:
    """Of this distribution, whose images carry the same tag."""
    return version("tandem-llm")


@dataclass(frozen=True)
class Defaults:
    """What stands in for what no pool says: images, where a mirror or a build has others."""

    tandem_image: str = field(default_factory=lambda: f"tandem:{own_version()}")
    """Of the sidecar, the EPP and the operator."""
    torch_image: str = field(default_factory=lambda: f"tandem-engine:{own_version()}")
    """Of the torch engine; with another tag where a pool names another version."""
    vllm_repository: str = "vllm/vllm-openai"
    """Of vLLM's images; the tag is `v` and the version."""
    vllm_version: str = VLLM_VERSION
    pull_policy: str | None = None
    """Of `tandem_image`; None: Kubernetes' own choice by the tag."""
    pod_networks: tuple[str, ...] = (
        "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7",
    )  # fmt: skip
    """Where prefill pods may be that a picker which is not ours names; the private ranges, until
    somebody says the cluster's own."""


DEFAULTS: Final = Defaults()


def resolve(
    kind: str, name: str, user: Mapping[str, Any], defaults: Defaults = DEFAULTS
) -> dict[str, Any]:
    """The spec of pool `name`, complete, from `user`: its valid spec, inheritance applied."""
    spec = deepcopy(dict(user))
    _resolve_model(spec["model"])
    _resolve_engine(spec.setdefault("engine", {}), defaults)
    _resolve_devices(spec)
    transfer = spec.setdefault("transfer", {})
    transfer.setdefault("connector", "nixl")
    transfer.setdefault("sideChannelPort", ports.SIDE_CHANNEL)
    transfer.setdefault("leaseDuration", _lease(spec["engine"]))
    transfer.setdefault("loadFailurePolicy", "recompute")
    if kind == DECODE_POOL:
        spec.setdefault("routing", {}).setdefault("endpoint", name)
    return defaulted_spec(kind, spec)


def _resolve_model(model: dict[str, Any]) -> None:
    model.setdefault("servedNames", [model["name"]])


def _resolve_engine(engine: dict[str, Any], defaults: Defaults) -> None:
    kind = engine.setdefault("type", "vllm")
    tagged = image_version(engine.get("image", ""))
    default = tagged or (defaults.vllm_version if kind == "vllm" else own_version())
    release = engine.setdefault("version", default)
    if kind == "vllm":
        upstream = f"{defaults.vllm_repository}:v{release}"
    elif release == own_version():
        upstream = defaults.torch_image
    else:
        upstream = f"{_untagged(defaults.torch_image)}:{release}"
    engine.setdefault("image", upstream)
    engine.setdefault("tuning", "auto")
    engine.setdefault("dtype", "auto")
    engine.setdefault("kvCacheDtype", "auto")


def _lease(engine: Mapping[str, Any]) -> str:
    renewed = engine["type"] == "torch" or LEASED.has(release(engine["version"]))
    return LEASE if renewed else LEASE_UNRENEWED


def _untagged(image: str) -> str:
    """An image without tag and digest; a registry's port is no tag."""
    return re.sub(r"(:[^/:@]+)?(@.*)?$", "", image, count=1)


def _resolve_devices(spec: dict[str, Any]) -> None:
    """Each of accelerator.count and parallelism follows from the other where it is left out."""
    accelerator = spec.setdefault("accelerator", {})
    count = accelerator.get("count")
    if "parallelism" not in spec:
        spec["parallelism"] = {"tensor": count or 1}
    if count is None:
        sizes = spec["parallelism"]
        devices = sizes.get("tensor", 1) * sizes.get("pipeline", 1) * sizes.get("data", 1)
        accelerator["count"] = 0 if spec["engine"]["type"] == "torch" else devices
