"""The product's picker as a router of the simulation, with one or several replicas."""

from collections.abc import Sequence
from random import Random
from typing import Final

from tandem_epp.backends.engine_page import ScrapeResult

from .engine import Engine
from .policies import Choice
from .replica import PickerSettings, Replica
from .work import Work

LLMD_DEFAULT: Final = """
plugins:
  - type: queue-scorer
  - type: kv-cache-utilization-scorer
  - type: prefix-cache-scorer
schedulingProfiles:
  - name: default
    plugins:
      - {pluginRef: queue-scorer, weight: 2}
      - {pluginRef: kv-cache-utilization-scorer, weight: 2}
      - {pluginRef: prefix-cache-scorer, weight: 3}
"""
"""The default weights of llm-d's scheduler."""


class RealPicker:
    """Each request goes to one of the replicas at random, as through a Service."""

    def __init__(
        self, engines: Sequence[Engine], seed: int, settings: PickerSettings | None = None
    ) -> None:
        settings = settings or PickerSettings()
        self.replicas = [
            Replica(len(engines), seed * 100 + i, settings) for i in range(settings.replicas)
        ]
        self._random = Random(seed)
        self._owners: dict[int, Replica] = {}
        """Index of a request that has not ended → the replica that placed it."""

    def choose(self, work: Work, now: float) -> Choice:
        """What one of the replicas decides."""
        replica = self._owners[work.index] = self._random.choice(self.replicas)
        placement = replica.place(work, now)
        prefill = int(placement.prefill[0].name) if placement.prefill else None
        return Choice(int(placement.decode.name), prefill)

    def on_response(self, work: Work, status: int, now: float) -> None:
        """The response headers pass the replica that placed the request."""
        self._owners[work.index].on_response(work, status, now)

    def on_end(self, work: Work, now: float) -> None:
        """The stream through that replica ends."""
        self._owners.pop(work.index).on_end(work, now)

    def on_scrape(self, pages: Sequence[ScrapeResult], now: float) -> None:
        """Every replica scrapes every pod."""
        for replica in self.replicas:
            replica.on_scrape(pages, now)
