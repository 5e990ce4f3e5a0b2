"""A request that waits, and what it counts. Pure."""

from hashlib import sha256
from typing import Final, NamedTuple

from ..backends.pods import Pod
from .elsewhere import Group
from .queue import Waiting
from .settings import BandSettings

_LONGEST_NAME: Final = 256
"""Characters of a tenant's name; a longer one counts by its hash, so that clients cannot make
messages between replicas long."""


QueueKey = tuple[tuple[Pod, ...], str | None, bool]
"""The pods that may serve its requests; the model, if there are none; and whether the requests need
a prefill pod. So a model and its adapters share a queue, in which each tenant has one share, and
what other pods serve waits elsewhere."""


class Held(Waiting):
    """A request that waits for pods of one model."""

    __slots__ = (
        "group", "has_ended", "hint", "is_split", "key", "model", "sender", "subset", "tokens",
        "work",
    )  # fmt: skip

    def __init__(
        self,
        model: str | None,
        priority: int,
        tenant: str,
        arrived: float,
        deadline: float,
        *,
        size: int,
        tokens: float,
        work: float,
        is_split: bool,
    ) -> None:
        """`tokens`: of prompt and answer, as far as no pod has their KV; `work`: all of them;
        `is_split`: whether it needs a prefill pod. `Flows` sets `tenant` and `cost`, as the
        settings say."""
        super().__init__(priority, tenant, arrived, deadline, size=size)
        self.model, self.tokens, self.is_split = model, tokens, is_split
        self.sender, self.work = short_name(tenant), max(1.0, work)
        self.hint: frozenset[str] | None = None
        """Addresses of the pods that the gateway allows; None: all."""
        self.has_ended = False
        """Whether it waits no longer."""
        self.group = Group(model, priority, is_split)
        """What other replicas are told. Set by `Flows`."""
        self.key: QueueKey = ((), model, is_split)
        """Its queue. Set by `Flows`."""
        self.subset: frozenset[str] | None = None
        """Once it goes: the addresses of the pods that have room for it; None: any may get it."""


def short_name(tenant: str) -> str:
    """The name by which all replicas know a tenant."""
    if len(tenant) <= _LONGEST_NAME:
        return tenant
    return sha256(tenant.encode("utf-8", "surrogatepass")).hexdigest()


class Charge(NamedTuple):
    """What a band counts for a request, and for which tenant."""

    tenant: str
    cost: float


def charge_of(band: BandSettings, sender: str, work: float) -> Charge:
    """What a request of `sender` with `work` tokens counts."""
    tenant = "" if band.fairness == "none" else sender
    return Charge(tenant, work if band.fairness == "tokens" else 1.0)


class Demand(NamedTuple):
    """What waits for pods of one model."""

    requests: int
    tokens: float
    """Of prompts and expected answers, as far as no pod has their KV."""
