"""Keys read from a directory, and read again when it changes (`--plan-key-dir` and others)."""

import logging
from collections.abc import Mapping
from pathlib import Path

from .plan import load_keys

_log = logging.getLogger(__name__)


class PlanKeys:
    """Key id → secret in `current`, empty when no directory is given or it never held a key."""

    def __init__(self, directory: Path | None) -> None:
        """Read `directory`. Raises ValueError or OSError when its keys cannot be used."""
        self._directory = directory
        self.current: Mapping[str, bytes] = load_keys(directory) if directory else {}

    @property
    def is_required(self) -> bool:
        """Whether a directory is given: without a key in it, no one can be trusted."""
        return self._directory is not None

    def reload(self) -> None:
        """Read the directory again; when its keys cannot be used, or it has none any more, keep the
        previous ones: without any nothing can be signed, and unsigned headers would count."""
        if self._directory is None:
            return
        try:
            keys = load_keys(self._directory)
        except (OSError, ValueError) as err:
            _log.warning("keys not reloaded, the previous keys stay in use: %s", err)
            return
        if self.current and not keys:
            _log.warning("keys in %s: none is left, the previous keys stay in use", self._directory)
            return
        if keys != self.current:
            _log.info("keys in %s: %s", self._directory, ", ".join(sorted(keys)) or "none")
            self.current = keys
