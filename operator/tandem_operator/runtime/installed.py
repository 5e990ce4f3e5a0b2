"""Whether the cluster's CRDs are those this operator was made for: asked once, at startup."""

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
    """The operator has nothing to watch; `str` says what to run."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"not installed in this cluster: {', '.join(self.names)}; {UPGRADE}"


async def check_crds(api: Api) -> Sequence[str]:
    """Lines for the log about CRDs that are not as this operator knows them; empty when all are.

    Raises CrdsMissing when one is not there, ApiError when the API server cannot be asked. Where
    CRDs may not be read (an operator bound to namespaces), that is the one line, and discovery
    tells whether they are there.
    """
    missing, lines = [], []
    for packaged in map(load_crd, KINDS):
        name = packaged["metadata"]["name"]
        try:
            installed = await api.get(CUSTOM_RESOURCE_DEFINITIONS, name)
        except Forbidden:
            await _check_served(api)
            return [
                "this operator may not read CustomResourceDefinitions, so whether they are of its"
                f" version ({_version(packaged)}) is not checked"
            ]
        except NotFound:
            missing.append(name)
            continue
        if (line := _difference(name, _version(installed), _version(packaged))) is not None:
            lines.append(line)
    if missing:
        raise CrdsMissing(tuple(missing))
    return lines


async def _check_served(api: Api) -> None:
    """Raises CrdsMissing when discovery lacks a kind: without the right to watch CRDs, kopf would
    never see it come."""
    try:
        found = await api.raw(f"/apis/{GROUP}/{VERSION}")
    except Forbidden:
        return
    except NotFound:
        found = {}
    served = {resource.get("kind") for resource in found.get("resources") or ()}
    names = [load_crd(kind)["metadata"]["name"] for kind in KINDS if kind not in served]
    if names:
        raise CrdsMissing(tuple(names))


def _difference(name: str, installed: int, packaged: int) -> str | None:
    if installed < packaged:
        return (
            f"{name} in this cluster has schema version {installed}, this operator knows"
            f" {packaged}: {UPGRADE}"
        )
    if installed > packaged:
        return (
            f"{name} in this cluster has schema version {installed}, newer than the {packaged} of"
            " this operator: upgrade the operator's image"
        )
    return None


def _version(crd: dict[str, Any]) -> int:
    """The schema's number; 0 when nobody wrote one."""
    said = str(crd["metadata"].get("annotations", {}).get(SCHEMA_VERSION, ""))
    return int(said) if said.isdigit() else 0
