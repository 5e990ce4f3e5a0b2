"""What GPUs can do, by their makers' data sheets: `GPUS["h100"]`.

All peaks are of dense matrices: data sheets of NVIDIA often show the double, for matrices of which
half of the elements are zero. Links are in bytes per second and direction: data sheets add up both
directions, so NVLink 4's "900 GB/s" is 450 here. Memory is in decimal gigabytes, as sold; drivers
report up to 7 % more.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple


class Gpu(NamedTuple):
    """One GPU, and what a node of its kind gives it."""

    title: str
    bf16: float
    """FLOP/s of 16-bit matrices, dense."""
    fp8: float
    """FLOP/s of 8-bit floating-point matrices, dense; 0: it has none."""
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes per second of the memory."""
    nvlink: float
    """Bytes per second and direction to the other GPUs of a node, over NVLink or Infinity Fabric;
    0: over PCIe."""
    pcie: float
    """Bytes per second and direction."""
    nic: float
    """Bytes per second and direction of the network, per GPU of a node in common use."""
    source: str

    @property
    def within_node(self) -> float:
        """Bytes per second and direction to the other GPUs of a node."""
        return self.nvlink or self.pcie


_PCIE_4: Final = 31.5e9
"""PCIe 4.0 x16 (PCI-SIG)."""
_PCIE_5: Final = 63.0e9
"""PCIe 5.0 x16 (PCI-SIG)."""
_GBIT: Final = 1e9 / 8

GPUS: Final[Mapping[str, Gpu]] = MappingProxyType({
    "a100": Gpu(
        "A100 SXM 80 GB", 312e12, 0.0, 80e9, 2.039e12, 300e9, _PCIE_4, 200 * _GBIT,
        "NVIDIA A100 data sheet (NVLink 600 GB/s in both directions); NIC: DGX A100",
    ),
    "h100": Gpu(
        "H100 SXM 80 GB", 989e12, 1979e12, 80e9, 3.35e12, 450e9, _PCIE_5, 400 * _GBIT,
        "NVIDIA H100 data sheet (1,979 and 3,958 TFLOPS are with sparsity, NVLink 900 GB/s in both "
        "directions); NIC: DGX H100",
    ),
    "h200": Gpu(
        "H200 SXM 141 GB", 989e12, 1979e12, 141e9, 4.8e12, 450e9, _PCIE_5, 400 * _GBIT,
        "NVIDIA H200 data sheet (with sparsity as of the H100); NIC: DGX H200",
    ),
    "b200": Gpu(
        "B200 SXM 180 GB", 2250e12, 4500e12, 180e9, 8.0e12, 900e9, _PCIE_5, 400 * _GBIT,
        "NVIDIA HGX B200 data sheet (NVLink 5: 1.8 TB/s in both directions); NIC: DGX B200",
    ),
    "l40s": Gpu(
        "L40S 48 GB", 362e12, 733e12, 48e9, 864e9, 0.0, _PCIE_4, 100 * _GBIT,
        "NVIDIA L40S data sheet (PCIe only); NIC: one of 200 Gbit/s for two GPUs",
    ),
    "mi300x": Gpu(
        "MI300X 192 GB", 1307e12, 2615e12, 192e9, 5.3e12, 448e9, _PCIE_5, 400 * _GBIT,
        "AMD MI300X data sheet (7 Infinity Fabric links of 128 GB/s in both directions, a "
        "link to each GPU); NIC: one of 400 Gbit/s for each GPU",
    ),
})  # fmt: skip
"""By the name that `tandem plan --gpu` takes."""
