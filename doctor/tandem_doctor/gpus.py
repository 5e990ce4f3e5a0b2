"""How the GPUs of this machine are connected, through NVML."""

from itertools import permutations
from typing import Final

import pynvml

from .facts import Gpu

_LEVELS: Final = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "one board",
    pynvml.NVML_TOPOLOGY_SINGLE: "one PCIe switch",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PCIe switches",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "one host bridge",
    pynvml.NVML_TOPOLOGY_NODE: "one socket",
    pynvml.NVML_TOPOLOGY_SYSTEM: "across sockets",
}


class NvmlUnavailable(Exception):
    """NVML cannot be used; the message says why."""


def read_gpus() -> tuple[Gpu, ...]:
    """The GPUs, and how near each is to the others. Raises NvmlUnavailable."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound as err:
        raise NvmlUnavailable("no NVIDIA driver: its library NVML is not installed") from err
    except pynvml.NVMLError as err:
        raise NvmlUnavailable(f"NVML: {err}") from err
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        nearness: dict[int, dict[int, str]] = {i: {} for i in range(len(handles))}
        for a, b in permutations(range(len(handles)), 2):
            nearness[a][b] = _nearness(handles[a], handles[b])
        return tuple(
            Gpu(i, str(pynvml.nvmlDeviceGetName(handle)), nearness[i])
            for i, handle in enumerate(handles)
        )
    except pynvml.NVMLError as err:
        raise NvmlUnavailable(f"NVML: {err}") from err
    finally:
        pynvml.nvmlShutdown()


def _nearness(a: object, b: object) -> str:
    try:
        status = pynvml.nvmlDeviceGetP2PStatus(a, b, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        if status == pynvml.NVML_P2P_STATUS_OK:
            return "nvlink"
        level = pynvml.nvmlDeviceGetTopologyCommonAncestor(a, b)
    except pynvml.NVMLError_NotSupported:  # in virtual machines
        return "unknown"
    return _LEVELS.get(level, f"level {level}")
