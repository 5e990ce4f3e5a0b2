"""The rate that one pair of engines is assumed to reach over a fabric, before anything is measured.

These are effective rates, well below the wire's: UCX over TCP is limited by the kernel's copies,
GPUDirect RDMA by the network card (typically 25 to 200 Gbit/s).
"""

from enum import StrEnum
from typing import Final


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
