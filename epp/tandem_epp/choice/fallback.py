"""Where a request goes that should be split and cannot be, or that no pod may decode. Pure.

1. a ready unified pod of the model, because it is made for both phases
2. the standard pool: any ready pod of the model, because every engine can serve a request alone
3. an error: no pod is ready, or `fallback_to_unified` is false

Ready pods are those of one model: a model that has lost its decode pods falls back while the others
are split as before. Within a step the pods with the least load are equal.

A request whose scheduling fails because of a bug is served in the same way, with the reason FAULT.
"""

from collections.abc import Sequence
from random import Random
from typing import Final

from tandem_contract.paths import Role, RoutingPath

from ..backends.pods import Pod
from .result import PathDecision

FAULT: Final = PathDecision(RoutingPath.FALLBACK, "fault")
"""Of a request whose scheduling failed."""


def choose_alone(ready: Sequence[Pod], random: Random) -> Pod:
    """The pod of `ready`, which is not empty, that serves a request alone."""
    candidates = unified_pods(ready) or ready
    least = min(pod.load for pod in candidates)
    return random.choice([pod for pod in candidates if pod.load == least])


def unified_pods(ready: Sequence[Pod]) -> Sequence[Pod]:
    """The unified pods of `ready`."""
    return [pod for pod in ready if pod.backend.role is Role.UNIFIED]
