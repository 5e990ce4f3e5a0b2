"""Which share of the KV transfers to a pod first tokens wait for, learned from its hand-offs.

    share = Σ seconds waited ÷ Σ seconds transferred

The sums are over hand-offs, of which the latest count most. Large transfers count by their size,
because a small one waits for a step of the engine, whatever its KV takes.
"""

from typing import Final

_KEPT: Final = 0.7
"""By how much the earlier sums count less with each hand-off: the first one between two pods is
never streamed, and the next ones are."""


class ExposedShare:
    """The share for one decode pod."""

    def __init__(self) -> None:
        self._waited = self._transferred = 0.0

    @property
    def value(self) -> float:
        """0 to 1. Before the first hand-off 1, as if it were not streamed."""
        return self._waited / self._transferred if self._transferred else 1.0

    def add(self, waited: float, transferred: float) -> None:
        """A transfer took `transferred` seconds, for `waited` of which the first token waited."""
        self._waited = _KEPT * self._waited + waited
        self._transferred = _KEPT * self._transferred + transferred
