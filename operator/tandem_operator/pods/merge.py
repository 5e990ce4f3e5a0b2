"""Merge a pool's `template` over the rendered Pod: Kubernetes' strategic merge patch.

Mappings merge field by field, null removes a field. Lists of objects with a merge key in Kubernetes
(containers by name, ports by number) merge object by object; every other list is replaced.
One handler of a probe or a hook replaces another.
`$patch: delete` removes an object of a list, `$patch: replace` replaces a whole mapping.
"""

from collections.abc import Mapping
from typing import Any, Final

_MERGE_KEYS: Final = {
    "containers": "name", "initContainers": "name", "ephemeralContainers": "name",
    "volumes": "name", "imagePullSecrets": "name", "resourceClaims": "name", "env": "name",
    "volumeMounts": "mountPath", "volumeDevices": "devicePath", "ports": "containerPort",
    "hostAliases": "ip", "topologySpreadConstraints": "topologyKey",
}  # fmt: skip
"""List → the field by which its objects are matched (`patchMergeKey`)."""

_HANDLERS: Final = {"exec", "httpGet", "tcpSocket", "grpc", "sleep"}
"""What a probe or a hook does. It has one of them, so that a template's replaces the rendered one:
a user need not know which kind that is, and the API server refuses two."""

_DIRECTIVE: Final = "$patch"


def merge(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `patch` merged over it; neither is changed."""
    # The directive itself must not reach the API server.
    if patch.get(_DIRECTIVE) == "replace":
        return {key: value for key, value in patch.items() if key != _DIRECTIVE}
    stated = {key for key in _HANDLERS & patch.keys() if patch[key] is not None}
    merged = {k: v for k, v in base.items() if not (stated and k in _HANDLERS - stated)}
    for key, value in patch.items():
        # In a strategic merge patch null removes the field.
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            old = merged.get(key)
            merged[key] = merge(old if isinstance(old, Mapping) else {}, value)
        elif isinstance(value, list) and isinstance(merged.get(key), list) and key in _MERGE_KEYS:
            merged[key] = _merge_list(merged[key], value, _MERGE_KEYS[key])
        else:
            merged[key] = value
    return merged


def _merge_list(base: list[Any], patch: list[Any], key: str) -> list[Any]:
    """The objects of `base` in their order, patched, followed by the new ones of `patch`."""
    # Items without a key cannot be matched: the list is replaced.
    if not all(isinstance(item, Mapping) for item in patch):
        return patch
    merged = list(base)
    for item in patch:
        at = next((i for i, old in enumerate(merged) if old.get(key) == item.get(key)), None)
        if item.get(_DIRECTIVE) == "delete":
            merged = [old for i, old in enumerate(merged) if i != at]
        elif at is None:
            merged.append(dict(item))
        else:
            merged[at] = merge(merged[at], item)
    return merged
