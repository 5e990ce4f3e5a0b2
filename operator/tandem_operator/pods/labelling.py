"""Any text as a label's value."""

import re
from typing import Final

_LONGEST: Final = 63


def label_value(text: str) -> str:
    """`text` with what a label's value cannot hold replaced by dashes; may end up empty.

    >>> label_value("meta-llama/Llama-3.1-8B")
    'meta-llama-Llama-3.1-8B'
    """
    replaced = re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:_LONGEST]
    return replaced.strip("-_.")
