"""CustomResourceDefinitions of gateways, copied from Go modules: the originals, not ours.

Each module holds the definitions of its project as YAML files. `download` copies them into the
cache; tests apply them to the API server, which then validates objects as in a real cluster.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from . import versions
from .gobuild import Go


@dataclass(frozen=True)
class Definitions:
    """The definitions of one project."""

    name: str
    module: str
    version: str
    files: str
    """A pattern of paths in the module."""

    def folder(self, cache: Path) -> Path:
        """Where the files are, once downloaded."""
        return cache / "gateway-crds" / f"{self.name}-{self.version}"


GATEWAY_API: Final = Definitions(
    "gateway-api",
    "sigs.k8s.io/gateway-api",
    versions.GATEWAY_API,
    "config/crd/standard/gateway.networking.k8s.io_[!v]*.yaml",
)
INFERENCE: Final = Definitions(
    "inference-extension",
    "sigs.k8s.io/gateway-api-inference-extension",
    versions.INFERENCE_EXTENSION,
    "config/crd/bases/*.yaml",
)
ISTIO: Final = Definitions(
    "istio", "istio.io/istio", versions.ISTIO, "manifests/charts/base/files/crd-all.gen.yaml"
)
ENVOY_GATEWAY: Final = Definitions(
    "envoy-gateway",
    "github.com/envoyproxy/gateway",
    versions.ENVOY_GATEWAY,
    "charts/gateway-helm/charts/crds/crds/generated/*.yaml",
)
ALL: Final = (GATEWAY_API, INFERENCE, ISTIO, ENVOY_GATEWAY)


def are_complete(cache: Path) -> bool:
    """Whether all definitions are in `cache`."""
    return all(each.folder(cache).is_dir() for each in ALL)


def module_folder(go: str, definitions: Definitions, cache: Path) -> Path:
    """The module that has `definitions`, in Go's own cache. Raises gobuild.BuildFailed."""
    (cache / "log").mkdir(parents=True, exist_ok=True)
    run = Go(go, cache, cache / "log" / "gateway-crds.log")
    name = f"{definitions.module}@v{definitions.version}"
    return Path(json.loads(run("mod", "download", "-json", name))["Dir"])


def download(go: str, cache: Path) -> None:
    """Copy the missing definitions into `cache`. Raises gobuild.BuildFailed."""
    for each in ALL:
        target = each.folder(cache)
        if target.is_dir():
            continue
        source = module_folder(go, each, cache)
        partial = target.with_name(f".{target.name}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for file in source.glob(each.files):
            shutil.copyfile(file, partial / file.name)
        # Renamed only when complete: an interrupted copy leaves no partial folder.
        partial.rename(target)
