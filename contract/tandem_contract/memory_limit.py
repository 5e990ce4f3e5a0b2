"""How many bytes a process holds for its clients, where no flag says it.

A body is in memory up to three times for a moment, when it is joined and sent on, and the prefix
index and all else need room too: so bodies get a quarter of the container's memory. More than
LARGEST_DEFAULT helps no gateway: it is 400,000 prompts of 1 KB, or 32 of the largest bodies.
"""

from pathlib import Path
from typing import Final

LARGEST_DEFAULT: Final = 512 << 20
"""Bytes; the default without a container's limit."""
_SHARE: Final = 4
"""A container's memory over what bodies may take of it."""
_CGROUP_FILES: Final = ("memory.max", "memory/memory.limit_in_bytes")
"""Where version 2 and version 1 of control groups say the limit."""


def default_held_bytes(largest_body: int, cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """The limit in bytes; at least one body of `largest_body` bytes fits."""
    limit = container_limit(cgroup)
    share = LARGEST_DEFAULT if limit is None else min(LARGEST_DEFAULT, limit // _SHARE)
    return max(share, least_held_bytes(largest_body))


def least_held_bytes(largest_body: int) -> int:
    """The least limit with which a body of `largest_body` bytes is served."""
    # An eighth of the limit is kept for small bodies.
    return 2 * largest_body


def container_limit(cgroup: Path) -> int | None:
    """The memory limit of this process's container in bytes; None: there is none."""
    for name in _CGROUP_FILES:
        try:
            text = (cgroup / name).read_text().strip()
        except OSError:
            continue
        # Version 2 writes "max" where there is none, version 1 a number near 2^63.
        return int(text) if text.isdigit() and int(text) < 1 << 62 else None
    return None
