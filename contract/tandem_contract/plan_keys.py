"""Keys read from a directory, and read again when it changes (`--plan-key-dir` and others)."""

import logging
from collections.abc import Mapping
from pathlib import Path

from .plan import load_keys

_log = logging.getLogger(__name__)


class PlanKeys:
    """Key id → secret in `current`, empty when no directory is given or it holds no key."""

    def __init__(self, directory: Path | None) -> None:
        """Read `directory`. Raises ValueError or OSError when its keys cannot be used."""
        self._directory = directory
        self.current: Mapping[str, bytes] = load_keys(directory) if directory else {}

    @property
    def is_required(self) -> bool:
        """Whether a directory is given: without a key in it, no one can be trusted."""
        return self._directory is not None

    def reload(self) -> None:
        """Read the directory again; when its keys cannot be used, keep the previous ones."""
        if self._directory is None:
            return
        try:
            keys = load_keys(self._directory)
        except (OSError, ValueError) as err:
            _log.warning("keys not reloaded, the previous keys stay in use: %s", err)
            return
        if keys != self.current:
            _log.info("keys in %s: %s", self._directory, ", ".join(sorted(keys)) or "none")
            self.current = keys
