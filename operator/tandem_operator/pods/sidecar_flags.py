"""Flags of the sidecar that change in running pods: the section `sidecar` of a DecodePool. Pure.

They stand as JSON in an annotation of the pod, which the operator patches on running pods. A
downwardAPI volume makes a file of it, which the sidecar reads as its `--config` and reads again
when it changes. Pods of an earlier operator have the flags as arguments instead and keep them.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from tandem_contract import labels
from tandem_contract.durations import format_duration

from ..resources.pools import Pool, PrefillPool
from ..resources.spec import SIDECAR, Sidecar

_VOLUME: Final = "sidecar-flags"
_DIRECTORY: Final = "/var/run/tandem/sidecar-flags"
_FILE: Final = "flags.yaml"
"""YAML, of which JSON is a part."""
_PATH: Final = f"{_DIRECTORY}/{_FILE}"
ARGUMENTS: Final = ("--config", _PATH)
"""The sidecar's arguments that name the file."""
MOUNT: Final = {"name": _VOLUME, "mountPath": _DIRECTORY, "readOnly": True}
"""The volume in the sidecar's container, as a directory: a file mounted by `subPath` would never be
written again."""
VOLUME: Final = {
    "name": _VOLUME,
    "downwardAPI": {
        "items": [
            {
                "path": _FILE,
                "fieldRef": {"fieldPath": f"metadata.annotations['{labels.SIDECAR_FLAGS}']"},
            }
        ]
    },
}
"""The pod's volume."""


def flags_text(settings: Sidecar) -> str:
    """The annotation's value: the flags as the sidecar's `--config` names them."""
    return json.dumps(
        {
            "prefill-timeout": format_duration(settings.prefill_timeout),
            "kv-transfer-timeout": format_duration(settings.kv_transfer_timeout),
            "fallback-to-unified": settings.fallback_to_unified,
            "retries": settings.retries,
            **_optional_flags(settings),
        }
    )


def _optional_flags(settings: Sidecar) -> dict[str, Any]:
    """Flags that are left to the sidecar unless the pool sets them: one of an earlier version knows
    not all of them, and reads nothing of a file that names an unknown one."""
    flags: dict[str, Any] = {}
    if settings.breaker_failures is not None:
        flags["breaker-failures"] = settings.breaker_failures
    if settings.breaker_cooldown is not None:
        flags["breaker-cooldown"] = format_duration(settings.breaker_cooldown)
    if settings.stream_kv is not None:
        flags["stream-kv"] = settings.stream_kv
    return flags


def reads_annotation(template: Mapping[str, Any]) -> bool:
    """Whether the sidecar of a pod template reads the file; false for a template of an earlier
    operator, of a prefill pool, and where the user's `template` replaces the arguments."""
    return _PATH in _arguments(template)


def with_flags(template: Mapping[str, Any], text: str) -> Mapping[str, Any]:
    """The pod template with the annotation `text`, if its sidecar reads it."""
    if not reads_annotation(template):
        return template
    metadata = template["metadata"]
    annotations = {**(metadata.get("annotations") or {}), labels.SIDECAR_FLAGS: text}
    return {**template, "metadata": {**metadata, "annotations": annotations}}


def has_flags_of(template: Mapping[str, Any], pool: Pool, rendered: Mapping[str, Any]) -> bool:
    """Whether pods of `template` can run with the pool's flags without being replaced.

    `rendered`: the pool's template as this operator renders it.
    """
    # Where today's pods do not read the annotation either, the flags change nothing.
    if isinstance(pool, PrefillPool) or not reads_annotation(rendered):
        return True
    if reads_annotation(template):
        return True
    # No earlier operator wrote these as arguments.
    if _optional_flags(pool.spec.sidecar):
        return False
    arguments, former = _arguments(template), _former_arguments(pool.spec.sidecar)
    starts = range(len(arguments) - len(former) + 1)
    return any(arguments[start : start + len(former)] == former for start in starts)


def _former_arguments(settings: Sidecar) -> list[str]:
    """The arguments in which an earlier operator wrote the flags, in its order."""
    fallback = "fallback-to-unified" if settings.fallback_to_unified else "no-fallback-to-unified"
    return [
        *("--prefill-timeout", format_duration(settings.prefill_timeout)),
        *("--kv-transfer-timeout", format_duration(settings.kv_transfer_timeout)),
        f"--{fallback}",
        *("--retries", str(settings.retries)),
    ]


def _arguments(template: Mapping[str, Any]) -> list[str]:
    # The user's `template` may have anything in these places, which only the API server judges.
    containers = template["spec"].get("initContainers")
    for container in containers if isinstance(containers, list) else ():
        if isinstance(container, Mapping) and container.get("name") == SIDECAR:
            arguments = container.get("args")
            return arguments if isinstance(arguments, list) else []
    return []
