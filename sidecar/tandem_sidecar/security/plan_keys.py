"""The keys plans are verified with, followed live as the files of a directory change."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tandem_contract.plan import load_keys

log = logging.getLogger(__name__)

RELOAD_SECONDS: Final = 1.0
"""How often the directory is looked at: far below the time a rotation keeps both keys."""


class PlanKeys:
    """Key id → secret in `current`, empty when no directory is given or it holds none."""

    def __init__(self, directory: Path | None) -> None:
        """Read `directory`. Raises ValueError or OSError when its keys cannot be used."""
        self._directory = directory
        self.current: Mapping[str, bytes] = load_keys(directory) if directory else {}

    def reload(self) -> None:
        """Take the directory's keys as they are now; unusable ones leave the old in place."""
        if self._directory is None:
            return
        try:
            keys = load_keys(self._directory)
        except (OSError, ValueError) as err:
            log.warning("plan keys not reloaded, the old ones stay: %s", err)
            return
        if keys != self.current:
            log.info("plan keys now: %s", ", ".join(sorted(keys)) or "none")
            self.current = keys
