"""How long a decode engine takes to read the KV of a prompt from a prefill engine, learned.

    seconds = latency + bytes ÷ rate            bytes = uncached tokens × KV bytes per token

The rate is learned per decode engine from its transfers. KV bytes per token come from the model's
config.json (`kv_size`) where one is at hand, else from the bytes of the transfers. Before there are
any, `assumed_kv_bytes` holds.
"""

from typing import Final, NamedTuple

from tandem_contract.fabric_classes import FabricClass

from .fabrics import CLASS_RATES, FABRICS, Fabric
from .learned_cost import LearnedCost
from .prefill_fit import PREFILL_PRIOR, PrefillCost

KV_BYTES_PRIOR: Final = 131_072.0
"""KV bytes per token before anything is known: 32 layers of 8 heads of 128, 2 bytes each, for keys
and values (Llama 3 8B)."""
_TYPICAL: Final = 1000
"""Tokens of the prompt by which an engine's speed is compared with the assumed one."""
_WEIGHT: Final = 0.1
"""Weight of the newest transfer in the moving average of bytes per token."""


class TransferCost(NamedTuple):
    """The figures of one decode engine."""

    latency: float
    """Seconds of a transfer of no bytes."""
    per_byte: float
    """Seconds per byte."""

    def seconds(self, count: float) -> float:
        """Seconds to transfer `count` bytes; 0 for none."""
        return self.latency + self.per_byte * count if count > 0 else 0.0


TRANSFER_PRIOR: Final = TransferCost(0.002, 1.0 / FABRICS[Fabric.RDMA].assumed)
"""Assumed before anything is measured: RDMA. The first transfers correct an assumption that is too
low; one that is too high would prevent them."""


def assumed_kv_bytes(prefill: PrefillCost) -> float:
    """KV bytes per token of an engine with this prefill, before a transfer to it is measured:
    KV_BYTES_PRIOR, or less in proportion if it computes prompts faster than PREFILL_PRIOR.

    A smaller model has less KV. A faster machine has not, but its first transfers correct the
    assumption. The KV of a large model would rule out every split of a small one, so that nothing
    were ever measured.
    """
    return KV_BYTES_PRIOR * min(1.0, prefill.seconds(_TYPICAL) / PREFILL_PRIOR.seconds(_TYPICAL))


Transfers = tuple[TransferCost, TransferCost, TransferCost]
"""The figures of one decode engine for each `FabricClass`."""


def _class_prior(fabric: FabricClass) -> TransferCost:
    return TransferCost(TRANSFER_PRIOR.latency, 1.0 / CLASS_RATES[fabric].assumed)


TRANSFERS_PRIOR: Final[Transfers] = (
    _class_prior(FabricClass.SAME_NODE),
    _class_prior(FabricClass.SAME_DOMAIN),
    _class_prior(FabricClass.ELSEWHERE),
)
"""Assumed of each class before any transfer to the pod is measured."""


class TransferFit(LearnedCost[TransferCost]):
    """The fit of one decode engine."""

    def __init__(self, prior: TransferCost = TRANSFER_PRIOR) -> None:
        super().__init__(TransferCost._make, prior)
        self.bytes_per_token: float | None = None
        """KV bytes per token, a moving average of its transfers; None without one."""

    def add(self, transfers: float, count: float, seconds: float, now: float) -> None:
        """Learn from `transfers` transfers of `count` bytes in `seconds`, all together."""
        if count > 0:
            self.window.add((transfers, count), seconds, now)

    def add_size(self, tokens: float, count: float) -> None:
        """Learn that the KV of `tokens` tokens has `count` bytes."""
        if tokens > 0 and count > 0:
            size, average = count / tokens, self.bytes_per_token
            self.bytes_per_token = size if average is None else average + _WEIGHT * (size - average)

    def restart(self) -> None:
        """The engine's process was replaced: start again."""
        super().restart()
        self.bytes_per_token = None
