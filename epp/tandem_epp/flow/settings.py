"""How requests wait, whatever configuration says it: Tandem's `flow_control`, or llm-d's section.

`flow_settings` reads the first; `llmd.plugins.flow_control` the second.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from tandem_contract.config import FlowControl

from .ceilings import Ceilings
from .detectors import Detector

UNLIMITED: Final = 1 << 62
"""Requests or bytes: more than any process holds."""
Fairness = Literal["none", "requests", "tokens"]
"""What tenants get equally much of; none: they are not told apart."""
Order = Literal["arrival", "deadline", "ttft"]
"""Which of a tenant's requests goes first: the one that came first, whose time to wait ends first,
or whose target for the time to its first token ends first."""


@dataclass(frozen=True)
class BandSettings:
    """What holds for the requests of one priority."""

    ttl: float = 60.0
    """Seconds that one waits at most."""
    max_requests: int = 5000
    """Requests that may wait."""
    max_bytes: int = UNLIMITED
    """Bytes of their bodies."""
    fairness: Fairness = "requests"
    order: Order = "arrival"


_DEFAULT: Final = BandSettings()


@dataclass(frozen=True)
class FlowSettings:
    """How the requests of all priorities wait."""

    default: BandSettings = _DEFAULT
    """What holds for a priority that has no band of its own."""
    negative: BandSettings | None = None
    """The same for negative priorities; None: as for others."""
    bands: Mapping[int, BandSettings] = field(default_factory=dict)
    """By priority."""
    no_endpoint_ttl: float = 0.0
    """Seconds that a request waits for the first pod of its model; 0: it is refused at once."""
    max_requests: int = UNLIMITED
    """Requests of all priorities that may wait."""
    max_bytes: int = UNLIMITED
    """Bytes of all bodies that may wait."""
    displace: bool = False
    """Whether a request for which there are too many bytes takes the place of one of a lower
    priority."""
    is_shedding: bool = True
    """Whether requests of a negative priority are refused before their time is over."""
    detector: Detector | None = None
    """Says when pods are saturated; None: the predictions do."""
    ceilings: Ceilings | None = None
    """With a detector: the saturation from which on each priority waits; None: 1."""

    @property
    def longest_ttl(self) -> float:
        """Seconds that any request may wait."""
        bands = (self.default, self.negative or self.default, *self.bands.values())
        return max(self.no_endpoint_ttl, *(band.ttl for band in bands))

    def band(self, priority: int) -> BandSettings:
        """What holds for requests of `priority`."""
        if (band := self.bands.get(priority)) is not None:
            return band
        return self.negative if priority < 0 and self.negative is not None else self.default


def flow_settings(config: FlowControl) -> FlowSettings | None:
    """What Tandem's own section says; None: no request waits."""
    if not config.enabled:
        return None

    def band(ttl: float | None, max_requests: int | None) -> BandSettings:
        return BandSettings(
            ttl=config.ttl if ttl is None else ttl,
            max_requests=config.max_requests if max_requests is None else max_requests,
            fairness=config.fairness,
            order=config.order,
        )

    return FlowSettings(
        default=band(None, None),
        bands={each.priority: band(each.ttl, each.max_requests) for each in config.bands},
        no_endpoint_ttl=config.no_endpoint_ttl,
        max_bytes=config.max_bytes,
        displace=config.displace,
    )
