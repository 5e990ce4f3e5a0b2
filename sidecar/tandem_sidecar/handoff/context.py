"""What every exchange of a process shares, and what it needs of the rooms below."""

from dataclasses import dataclass
from typing import Protocol

import msgspec

from tandem_contract.commandline import HostPort

from ..bodies.kinds import Kind
from ..bodies.parse import Body
from ..connectors.handover import Attempt, Handover, Inquiry, Outgoing
from ..http.messages import Request
from ..http.upstream import Pool
from ..observability.record import Leg, Record
from ..security.route import Route
from ..settings import Settings
from .breaker import Breakers
from .lifecycle import Lifecycle
from .liveness import Vigil


class Connector(Protocol):
    """How the two legs of a hand-off are written."""

    @property
    def together(self) -> bool:
        """Whether the legs run at once; else the decode leg needs the prefill's answer."""

    @property
    def light_release(self) -> bool:
        """Whether a release is a word, and not a request that the decode engine runs.

        A word does no harm once the decode leg went out, and is less work than the prefill.
        """

    @property
    def waits_without_end(self) -> bool:
        """Whether decode waits for KV that never comes until its client leaves."""

    def inquiry(self, attempt: Attempt) -> Inquiry | None:
        """What the prefill pod must be asked first; None: nothing, or it is known."""

    def learned(self, attempt: Attempt, answer: bytes) -> None:
        """Take its answer's body. Raises ParamsUnusable."""

    def forget(self, prefill: HostPort) -> None:
        """What was learned of a pod is void: it failed."""

    def prefill(self, kind: Kind, body: Body, attempt: Attempt) -> bytes:
        """Body of the prefill leg."""

    def expected(self, attempt: Attempt) -> Handover:
        """What the prefill will hand over, when `together`."""

    def handover(self, attempt: Attempt, answer: bytes) -> Handover:
        """What the prefill answer hands over. Raises ParamsUnusable."""

    def decode(self, kind: Kind, body: Body, handover: Handover) -> bytes:
        """Body of the decode leg."""

    def release(self, kind: Kind, body: Body, handover: Handover) -> Outgoing | None:
        """The request that has the prefill pod free what nobody will read; None: there is none."""


class Observer(Protocol):
    """Who makes metrics, history, spans and logs of what happens."""

    def on_request_start(self, record: Record) -> None:
        """A request is being served; its record is filled from now on."""

    def on_request_end(self, record: Record) -> None:
        """It has ended; only releases may still end after it."""

    def on_release_end(self, record: Record, leg: Leg) -> None:
        """A release of it ended."""


@dataclass(slots=True)
class Tools:
    """What every exchange of a process shares."""

    settings: Settings
    """Replaced by a reload: a request keeps those it began with."""
    pool: Pool
    connector: Connector
    observer: Observer
    lifecycle: Lifecycle
    breakers: Breakers
    vigil: Vigil


class Generation(msgspec.Struct, frozen=True):
    """A request that generates, understood."""

    request: Request
    request_id: str
    kind: Kind
    body: Body
    route: Route
    record: Record
    settings: Settings
    """Those it began with."""
