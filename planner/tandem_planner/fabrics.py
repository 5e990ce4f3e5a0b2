"""What KV is transferred over: how close two pods are, what a fabric can do, and when a transfer is
worth it.

    assumed rate = peak × efficiency
    verdict      by seconds of the transfer ÷ seconds of the prefill

The peak is that of one direction of one link, from the specification that `FABRICS` names. Engines
reach a part of it only: UCX over TCP is limited by the kernel's copies, RDMA by the size of a KV
block, shared memory by two copies, CUDA IPC by the many small copies of blocks.
"""

from enum import StrEnum
from typing import Final, NamedTuple

from tandem_contract.fabric_classes import FabricClass


class Fabric(StrEnum):
    """The interconnect that KV blocks are transferred over."""

    TCP = "tcp"
    RDMA = "rdma"
    SHARED_MEMORY = "shared memory"
    PCIE = "pcie"
    NVLINK = "nvlink"


class FabricRate(NamedTuple):
    """What one pair of engines is assumed to reach for the KV blocks of a long prompt, before
    anything is measured."""

    peak: float
    """Bytes per second of the link."""
    efficiency: float
    """Share of the peak that a pair of engines reaches."""
    link: str
    """The link that the peak is of."""

    @property
    def assumed(self) -> float:
        """Bytes per second."""
        return self.peak * self.efficiency


FABRICS: Final = {
    Fabric.TCP: FabricRate(1.25e9, 0.8, "10 Gbit/s Ethernet (IEEE 802.3ae)"),
    Fabric.RDMA: FabricRate(12.5e9, 0.8, "100 Gbit/s, InfiniBand EDR or RoCE"),
    Fabric.SHARED_MEMORY: FabricRate(20e9, 0.2, "one core's copies in DDR4 or DDR5 memory"),
    Fabric.PCIE: FabricRate(31.5e9, 0.4, "PCIe 4.0 x16 (PCI-SIG)"),
    Fabric.NVLINK: FabricRate(450e9, 1 / 9, "NVLink 4, one direction (NVIDIA H100)"),
}
"""The slowest link of each kind that is in common use."""

CLASS_RATES: Final = {
    # What moves KV within a node is not known: slower than NVLink, faster than copies by the CPU.
    FabricClass.SAME_NODE: FABRICS[Fabric.PCIE],
    FabricClass.SAME_DOMAIN: FABRICS[Fabric.RDMA],
    FabricClass.ELSEWHERE: FabricRate(12.5e9, 0.4, "100 Gbit/s Ethernet (IEEE 802.3bm), over TCP"),
}
"""What the pairs of a fabric class are assumed to reach before a transfer to the pod is measured.
Too low: the first requests of the class are not split, so that nothing is measured."""


class Verdict(StrEnum):
    """What a transfer costs beside the prefill that it spares the decode pod."""

    NEGLIGIBLE = "negligible"
    """At most 5 % of the prefill."""
    TOLERABLE = "tolerable"
    """At most 25 %."""
    CONSIDERABLE = "considerable"
    """At most half: a split pays off where prefills delay many decodes."""
    TOO_SLOW = "too slow"
    """More than half: requests are not split."""


MAX_TRANSFER_SHARE: Final = 0.5
"""Largest transfer for which a request is split, as a share of the prefill that the decode pod
would make itself of the same tokens."""
_SHARES: Final = (
    (0.05, Verdict.NEGLIGIBLE),
    (0.25, Verdict.TOLERABLE),
    (MAX_TRANSFER_SHARE, Verdict.CONSIDERABLE),
)


def verdict(transfer: float, prefill: float) -> Verdict:
    """The verdict on a transfer of `transfer` seconds for a prefill of `prefill` seconds."""
    return next((name for share, name in _SHARES if transfer <= share * prefill), Verdict.TOO_SLOW)


def least_rate(kv_bytes: float, prefill: float) -> float:
    """Bytes per second below which `kv_bytes` take too long beside a prefill of `prefill` s."""
    return kv_bytes / (MAX_TRANSFER_SHARE * prefill)


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
