"""What KV is transferred over: how close two pods are, and the rate that one pair of engines is
assumed to reach over a fabric before anything is measured.

These are effective rates, well below the wire's: UCX over TCP is limited by the kernel's copies,
GPUDirect RDMA by the network card (typically 25 to 200 Gbit/s).
"""

from enum import StrEnum
from typing import Final, NamedTuple

from tandem_contract.fabric_classes import FabricClass


class Fabric(StrEnum):
    """The interconnect that KV blocks are transferred over."""

    TCP = "tcp"
    RDMA = "rdma"
    SHARED_MEMORY = "shared memory"
    NVLINK = "nvlink"


ASSUMED_RATE: Final = {
    Fabric.TCP: 1.0e9,
    Fabric.RDMA: 10.0e9,
    Fabric.SHARED_MEMORY: 4.0e9,
    Fabric.NVLINK: 50.0e9,
}
"""Bytes per second between one pair of engines, for the KV blocks of a long prompt."""


class Place(NamedTuple):
    """Where a pod runs. Pods of one node are in one domain."""

    node: str | None = None
    """None: not known, so no other pod is on the same one."""
    domain: str | None = None
    """None: not known, so no other pod is in the same one."""


def fabric_class(first: Place, second: Place) -> FabricClass:
    """The fabric class of a pair of pods."""
    if first.node is not None and first.node == second.node:
        return FabricClass.SAME_NODE
    if first.domain is not None and first.domain == second.domain:
        return FabricClass.SAME_DOMAIN
    return FabricClass.ELSEWHERE
