"""The type of prefix chains. A module of its own, because mypyc compiles no alias like this one."""

from array import array
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    Chain: TypeAlias = array[int]
else:
    # Python 3.11's array takes no parameter at run time.
    Chain = array
"""The hashes of a prompt's whole blocks, the first block first: an `array('Q')`."""
