"""How the C library's allocator treats large blocks, such as request bodies.

glibc takes a block above 128 KiB from the kernel and gives it back when it is freed. The kernel
clears its pages each time, which costs more than all other work on a body of 220 KB.
"""

import ctypes
from typing import Final

LARGEST: Final = 4 << 20
"""Bytes of blocks that are taken from the heap and reused. Larger bodies are rare."""
KEPT: Final = 16 << 20
"""Bytes of free memory at the heap's end that are kept. Too low: the kernel takes it back and
clears it again; too high: the process holds memory that it does not need."""
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
"""Parameters of mallopt(3)."""


def reuse_large_blocks() -> bool:
    """Have blocks of up to `LARGEST` bytes reused; False: the C library is not glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST) and mallopt(_TRIM_THRESHOLD, KEPT))
