"""What the restricted pod security standard asks of pods and containers. Pure."""

from typing import Any, Final

_USER: Final = 65532
"""Nobody's in any image, so that it owns no file there."""


def pod_security() -> dict[str, Any]:
    """`securityContext` of a pod; volumes are writable for its user."""
    return {
        "runAsNonRoot": True,
        "runAsUser": _USER,
        "runAsGroup": _USER,
        "fsGroup": _USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security(*, read_only: bool) -> dict[str, Any]:
    """`securityContext` of a container; `read_only`: whether its root filesystem is."""
    context = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return {**context, "readOnlyRootFilesystem": True} if read_only else context
