"""How often Python's collector looks for reference cycles.

A request leaves few cycles behind, if any: nearly all of it is freed by reference counts. With
Python's own thresholds the collector takes 6 to 8 % of a busy EPP's time, for objects that live as
long as the process.
"""

import gc
from typing import Final

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
