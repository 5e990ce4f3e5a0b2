"""What this router knows of each backend: its load, its health, its prefix index, its pairs.

`Pod` and `fleet.Fleet` are the only state that requests share. They live on one event loop; whoever
scrapes or places a request changes them between two awaits, so nothing locks.
"""

from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

from tandem_contract.config import Backend
from tandem_contract.paths import Role
from tandem_contract.timing import Timing

from .prefix_index import GENERATIONS, PrefixIndex

BLOCK_TOKENS: Final = 16
"""Block size of a backend that does not tell its own: vLLM's default."""
CAPACITY_BLOCKS: Final = 31_250
"""Index capacity of a backend that does not tell its block count: half a million tokens."""
REFUSALS: Final = 3
"""Failed scrapes in a row that make a backend unhealthy; one is enough before its first answer."""
_RATE_WEIGHT: Final = 0.1
"""Weight of the newest figure in the learned prefill rate."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """A backend's own account of its load."""

    running: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0
    """Share of the KV cache in use, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Report:
    """One scrape: the gauges, and what identifies the process and its cache."""

    gauges: Gauges
    incarnation: bytes
    """Differs between two processes; empty when the page does not tell."""
    block_tokens: int | None = None
    blocks: int | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """A backend as discovery has it now."""

    backend: Backend
    uid: str = ""
    """Another one under the same name is another pod, with empty caches."""
    serving: bool = True
    """False: known, and not to be chosen; it is not ready, or it leaves."""


class Pod:
    """One backend."""

    def __init__(
        self,
        backend: Backend,
        block_tokens: int = BLOCK_TOKENS,
        capacity: int = CAPACITY_BLOCKS,
    ) -> None:
        self.backend = backend
        self.serving = True
        """Whether discovery has it ready for new requests."""
        self.address = _literal(backend)
        """`ip:port`; None while a host name is not resolved, and then it is not chosen."""
        self.gauges: Gauges | None = None
        """None until the first scrape."""
        self.index = PrefixIndex(capacity)
        """Prompts placed here: where their like should go too."""
        self.held = PrefixIndex(capacity)
        """Prompts answered from here. While the first of its kind is still being prefilled, only
        this one knows that its KV is not here yet."""
        self.block_tokens = block_tokens
        self.in_flight = 0
        """Requests placed here by this router and not ended."""
        self.prefill_rate: float | None = None
        """Prompt tokens computed per second, learned from what the sidecar reports."""
        self.healthy = True
        """True until a scrape fails: a backend can serve before it is first scraped."""
        self.suspect = False
        """Whether a request failed at it since its last scrape: others are preferred."""
        self.cold: set[Pod] = set()
        """Prefill pods whose first hand-off to this one is under way: others are preferred."""
        self.incarnation = b""
        """Which process answered the last scrape; empty when it does not tell."""
        self._failures = 0

    @property
    def name(self) -> str:
        """The backend's name, as plans, metrics and response headers say it."""
        return self.backend.name

    @property
    def load(self) -> float:
        """Requests in flight, divided by the backend's weight."""
        return self.in_flight / self.backend.weight

    @property
    def ready(self) -> bool:
        """Whether it may be chosen."""
        return self.serving and self.healthy and self.address is not None

    def reported(self, report: Report) -> bool:
        """Take a scrape in; true when it changes what scorers see."""
        changed = report.gauges != self.gauges or not self.healthy or self.suspect
        if report.incarnation != self.incarnation:
            self.incarnation = report.incarnation
            self._forget()
        if report.block_tokens and report.block_tokens != self.block_tokens:
            self.block_tokens = report.block_tokens
            self._forget()
        if report.blocks:
            self.index.resize(max(GENERATIONS, report.blocks))
            self.held.resize(max(GENERATIONS, report.blocks))
        self.gauges, self.healthy, self._failures = report.gauges, True, 0
        self.suspect = False
        return changed

    def unreachable(self) -> bool:
        """Count a failed scrape; true when it makes the backend unhealthy."""
        self._failures += 1
        if not self.healthy or (self.gauges is not None and self._failures < REFUSALS):
            return False
        self.healthy = False
        self._forget()
        return True

    def _forget(self) -> None:
        self.index.clear()
        self.held.clear()

    def learn(self, timing: Timing) -> None:
        """Take in what the sidecar reported of a prefill that ran here."""
        if timing.computed and timing.compute:
            rate = timing.computed / timing.compute
            known = self.prefill_rate
            self.prefill_rate = rate if known is None else known + _RATE_WEIGHT * (rate - known)


def may_prefill(pod: Pod, decode: Pod) -> bool:
    """Whether `pod` is there to run the prefill of requests that decode on `decode`.

    Never for itself, and a unified backend not for another one: two engines that each do both are
    no disaggregation. Nor for another model.
    """
    roles = {pod.backend.role, decode.backend.role}
    return (
        pod is not decode
        and pod.backend.role.serves(Role.PREFILL)
        and roles != {Role.UNIFIED}
        and _share_a_model(pod, decode)
    )


def may_hand_over(pod: Pod, decode: Pod) -> bool:
    """Whether `decode` can read the KV of a prefill that `pod` is there to run."""
    return may_prefill(pod, decode) and share_kv(pod, decode)


def share_kv(pod: Pod, decode: Pod) -> bool:
    """Whether they have one KV compat hash and a model in common."""
    return pod.backend.compat == decode.backend.compat and _share_a_model(pod, decode)


def _share_a_model(pod: Pod, decode: Pod) -> bool:
    ours, theirs = pod.backend.models, decode.backend.models
    return ours == theirs or not ours or not theirs or not set(ours).isdisjoint(theirs)


def _literal(backend: Backend) -> str | None:
    """The address where the URL holds one, None where it holds a name."""
    try:
        ip_address(backend.address.rpartition(":")[0].strip("[]"))
    except ValueError:
        return None
    return backend.address
