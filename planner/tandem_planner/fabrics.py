"""What one stream of KV over a fabric is assumed to reach, for plans made before anything ran.

Effective rates of one pair of engines, well below the wire's: UCX over TCP is bound by the kernel's
copies, GPUDirect RDMA by the network card (seed 004's network table asks for 25 to 200 Gbit/s).
"""

from enum import StrEnum
from typing import Final


class Fabric(StrEnum):
    """How KV blocks move."""

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
"""Bytes per second, one pair, blocks of a long prompt."""
