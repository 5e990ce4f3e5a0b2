"""The file of --router-settings: what Envoy and EPP of every endpoint are given. All is optional.

    envoy: {replicas: 2, threads: 4, resources: {limits: {memory: 1Gi}}}
    epp: {replicas: 1, resources: {requests: {cpu: 250m}}}
    nodeSelector: {disk: fast}
    tolerations: [{key: router, operator: Exists}]
    priorityClassName: high
    imagePullSecrets: [{name: registry}]      # each in the namespaces of the pools

Errors: `DocumentError`, with file, line and field.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from tandem_contract.documents import Document, DocumentError, load_documents

from ..planning.drift import quantity
from .router_observed import RouterSettings

_PLACE: Final = re.compile(r" - at `\$\.?(.*)`$")
_Few = Annotated[int, msgspec.Meta(ge=1, le=100)]
_Text = Annotated[str, msgspec.Meta(min_length=1)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    pass


class _Resources(_Strict, frozen=True, omit_defaults=True):
    requests: dict[str, str | int | float] = {}
    limits: dict[str, str | int | float] = {}


class _Epp(_Strict, frozen=True):
    replicas: _Few | None = None
    resources: _Resources | None = None


class _Envoy(_Epp, frozen=True):
    threads: _Few | None = None


class _Toleration(_Strict, frozen=True, omit_defaults=True):
    key: str | None = None
    operator: Literal["Exists", "Equal"] | None = None
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = None


class _Secret(_Strict, frozen=True):
    name: _Text


class _File(_Strict, frozen=True):
    envoy: _Envoy = _Envoy()
    epp: _Epp = _Epp()
    node_selector: dict[str, str] = {}
    tolerations: tuple[_Toleration, ...] = ()
    priority_class_name: _Text | None = None
    image_pull_secrets: tuple[_Secret, ...] = ()


def router_settings(file: Path, settings: RouterSettings) -> RouterSettings:
    """`settings` with what `file` says in their place. Raises DocumentError."""
    documents = load_documents(file)
    if len(documents) != 1 or not isinstance(documents[0].data, dict):
        fields = ", ".join(field.encode_name for field in msgspec.structs.fields(_File))
        raise DocumentError(f"{file}:1: expected one YAML mapping of {fields}")
    given = _read(documents[0])
    said: dict[str, Any] = {
        "envoy_replicas": given.envoy.replicas,
        "envoy_threads": given.envoy.threads,
        "envoy_resources": _resources(documents[0], "envoy", given.envoy.resources),
        "epp_replicas": given.epp.replicas,
        "epp_resources": _resources(documents[0], "epp", given.epp.resources),
        "node_selector": given.node_selector,
        "tolerations": tuple(msgspec.to_builtins(given.tolerations)),
        "priority_class": given.priority_class_name,
        "image_pull_secrets": tuple(secret.name for secret in given.image_pull_secrets),
    }
    return replace(settings, **{name: value for name, value in said.items() if value})


def _read(document: Document) -> _File:
    try:
        return msgspec.convert(document.data, _File)
    except msgspec.ValidationError as err:
        place = _PLACE.search(str(err))
        raise document.error(place[1] if place else "", _PLACE.sub("", str(err))) from err


def _resources(document: Document, part: str, given: _Resources | None) -> Mapping[str, Any] | None:
    if given is None:
        return None
    found: dict[str, dict[str, Any]] = msgspec.to_builtins(given)
    for kind, amounts in found.items():
        for name, amount in amounts.items():
            if quantity(amount) is None:
                path = (part, "resources", kind, name)
                raise document.error(path, f"{amount!r} is no quantity: write 500m, 2 or 1Gi")
    return found
