"""How the C library's allocator treats large blocks, and how often Python looks for cycles.

glibc takes a block above 128 KiB, such as a request body, from the kernel and gives it back when it
is freed. The kernel clears its pages each time, which costs more than all other work on a body of
220 KB.

A request leaves few cycles behind, if any: nearly all of it is freed by reference counts. With
Python's own thresholds the collector takes 6 to 8 % of the time of a busy EPP or sidecar, for
objects that live as long as the process.
"""

import ctypes
import gc
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


YOUNG: Final = 20_000
"""Container objects made and not freed before the youngest are searched, which takes about a
millisecond. Lower: more searches; higher: a longer pause, and cycles keep more memory."""
_OLDER: Final = (20, 50)
"""Searches of a generation before the next older one is searched, too."""


def collect_seldom() -> None:
    """Search less often, and never what exists now. Call it after the imports."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *_OLDER)
