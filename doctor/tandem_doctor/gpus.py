"""How this machine's GPUs are joined, through NVML."""

from itertools import permutations
from typing import Final

import pynvml

from .facts import Gpu

_LEVELS: Final = (
    (pynvml.NVML_TOPOLOGY_INTERNAL, "one board"),
    (pynvml.NVML_TOPOLOGY_SINGLE, "one PCIe switch"),
    (pynvml.NVML_TOPOLOGY_MULTIPLE, "PCIe switches"),
    (pynvml.NVML_TOPOLOGY_HOSTBRIDGE, "one host bridge"),
    (pynvml.NVML_TOPOLOGY_NODE, "one socket"),
    (pynvml.NVML_TOPOLOGY_SYSTEM, "across sockets"),
)


class NoGpus(Exception):
    """NVML cannot be asked; the message says why."""


def gpus() -> tuple[Gpu, ...]:
    """The GPUs and how near each is to the others. Raises NoGpus."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as err:
        raise NoGpus(f"NVML: {err}") from err
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        nearness: dict[int, dict[int, str]] = {i: {} for i in range(len(handles))}
        for one, other in permutations(range(len(handles)), 2):
            nearness[one][other] = _nearness(handles[one], handles[other])
        return tuple(
            Gpu(i, str(pynvml.nvmlDeviceGetName(handle)), nearness[i])
            for i, handle in enumerate(handles)
        )
    except pynvml.NVMLError as err:
        raise NoGpus(f"NVML: {err}") from err
    finally:
        pynvml.nvmlShutdown()


def _nearness(one: object, other: object) -> str:
    try:
        status = pynvml.nvmlDeviceGetP2PStatus(one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        if status == pynvml.NVML_P2P_STATUS_OK:
            return "nvlink"
        level = pynvml.nvmlDeviceGetTopologyCommonAncestor(one, other)
    except pynvml.NVMLError_NotSupported:  # in virtual machines
        return "unknown"
    return str(dict(_LEVELS).get(level, f"level {level}"))
