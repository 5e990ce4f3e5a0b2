"""llm-d's feature gates: `featureGates` of the configuration and `--feature-gates`. Pure.

None of them changes what the EPP does: it always does what the others turn on, and has no flow
control. As in llm-d the flag's entries follow the configuration's, and the last entry of a gate
counts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from .names import unknown_name
from .unsupported import NOT_BUILT

FLOW_CONTROL: Final = "flowControl"
_REASONS: Final[Mapping[str, str]] = {
    FLOW_CONTROL: NOT_BUILT,
    "haPopulateNonLeaderDatastore": "every replica follows discovery",
    "dataLayer": "the EPP always reads the engines' load metrics",
    "prepareDataPlugins": "the EPP always prepares what scorers need",
}
"""Gate, older ones included → why it has no effect."""
_TRUE: Final = ("1", "t", "true")
_FALSE: Final = ("0", "f", "false")


@dataclass(frozen=True)
class FeatureGate:
    """A gate that is named."""

    name: str
    reason: str
    """Why it has no effect."""
    is_lost: bool
    """Whether its user misses something."""


def read_gate(text: str) -> FeatureGate:
    """The gate in `name`, `name=true` or `name=false`. Raises ValueError for any other text."""
    name, _, value = text.partition("=")
    if name not in _REASONS:
        raise ValueError(unknown_name("feature gate", name, _REASONS.keys()))
    value = value.strip().lower() or "true"
    if value not in (*_TRUE, *_FALSE):
        raise ValueError(f"{text!r}: write {name}=true or {name}=false")
    is_lost = name == FLOW_CONTROL and value in _TRUE
    return FeatureGate(name, _REASONS[name], is_lost)


def last_entries(texts: Iterable[str]) -> dict[str, FeatureGate]:
    """The entry that counts of each gate in `texts`, by the gate's name. Raises ValueError."""
    return {gate.name: gate for gate in map(read_gate, texts)}
