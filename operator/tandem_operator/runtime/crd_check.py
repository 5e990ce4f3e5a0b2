"""Checks once, at startup, that the cluster's CRDs exist and match this operator's version."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tandem_contract.labels import GROUP, SCHEMA_VERSION, VERSION
from tandem_kube.client import Api
from tandem_kube.errors import Forbidden, NotFound
from tandem_kube.resources import CUSTOM_RESOURCE_DEFINITIONS

from ..crd import KINDS, load_crd

UPGRADE: Final = (
    "run `kubectl apply --server-side --force-conflicts -f crds/` in this release's sources,"
    " or `helm upgrade` with crds.install=true"
)


@dataclass(frozen=True)
class CrdsMissing(Exception):
    """The CRDs are not installed, so there is nothing to watch; `str` says what to run."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"not installed in this cluster: {', '.join(self.names)}; {UPGRADE}"


async def check_crds(api: Api) -> Sequence[str]:
    """Warnings about CRDs whose schema version differs from this operator's; empty when none does.

    Raises CrdsMissing when one is not installed, and ApiError when a call fails. An operator that
    serves only some namespaces may usually not read CRDs. Then the one warning says so, and API
    discovery shows whether they are installed.
    """
    missing, lines = [], []
    for packaged in map(load_crd, KINDS):
        name = packaged["metadata"]["name"]
        try:
            installed = await api.get(CUSTOM_RESOURCE_DEFINITIONS, name)
        except Forbidden:
            await _check_served(api)
            return [
                "RBAC does not let the operator read CustomResourceDefinitions: it cannot check"
                f" that they have schema version {_version(packaged)}"
            ]
        except NotFound:
            # Go on, so that the error names every CRD that is missing.
            missing.append(name)
            continue
        if (line := _difference(name, _version(installed), _version(packaged))) is not None:
            lines.append(line)
    if missing:
        raise CrdsMissing(tuple(missing))
    return lines


async def _check_served(api: Api) -> None:
    """Raise CrdsMissing when discovery lacks a kind."""
    try:
        # By default every authenticated client may use discovery. Where it may not, the kinds are
        # taken to be there.
        api_resources = await api.raw(f"/apis/{GROUP}/{VERSION}")
    except Forbidden:
        return
    except NotFound:
        api_resources = {}
    served = {resource.get("kind") for resource in api_resources.get("resources") or ()}
    names = [load_crd(kind)["metadata"]["name"] for kind in KINDS if kind not in served]
    if names:
        raise CrdsMissing(tuple(names))


def _difference(name: str, installed: int, packaged: int) -> str | None:
    if installed < packaged:
        return (
            f"{name} in this cluster has schema version {installed}, but this operator needs"
            f" {packaged}: {UPGRADE}"
        )
    if installed > packaged:
        return (
            f"{name} in this cluster has schema version {installed}, newer than the {packaged} of"
            " this operator: upgrade the operator's image"
        )
    return None


def _version(crd: dict[str, Any]) -> int:
    """The schema version from the CRD's annotation; 0 when it has none."""
    text = str(crd["metadata"].get("annotations", {}).get(SCHEMA_VERSION, ""))
    return int(text) if text.isdigit() else 0
