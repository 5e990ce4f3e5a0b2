"""What a container needs of its pod. Pure."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ContainerNeeds:
    """Environment and mounts of a container, with the volumes that the pod must have for them."""

    env: dict[str, Any] = field(default_factory=dict)
    """Name → value, or a mapping of the value's source (`valueFrom`)."""
    mounts: list[dict[str, Any]] = field(default_factory=list)
    volumes: list[dict[str, Any]] = field(default_factory=list)

    def __add__(self, other: "ContainerNeeds") -> "ContainerNeeds":
        return ContainerNeeds(
            self.env | other.env, self.mounts + other.mounts, self.volumes + other.volumes
        )


def read_only_mount(volume: dict[str, Any], path: str) -> ContainerNeeds:
    """`volume` mounted at `path`."""
    mount = {"name": volume["name"], "mountPath": path, "readOnly": True}
    return ContainerNeeds(mounts=[mount], volumes=[volume])
