"""What pods would load of a prompt from their external stores (tier StorageWarm)."""

from tandem_planner.choice import Candidates
from tandem_planner.storage import NO_LOAD, Load, worthwhile_load

from ..backends.fleet_figures import FleetFigures
from ..backends.pods import Pod
from .context import ChoiceContext

Loads = dict[int, Load]
"""Row of `FleetFigures` → what its pod would load; pods that load nothing are absent."""


def load_of(context: ChoiceContext, pod: Pod, cached: int) -> Load:
    """What `pod`, which has `cached` tokens of the prompt of `context`, would load of it."""
    if context.precise is None or not context.precise.stored:
        return NO_LOAD
    return _load(context, pod, cached, context.now)


def add_loads(
    context: ChoiceContext, candidates: Candidates, pods: FleetFigures, now: float
) -> tuple[Candidates, Loads]:
    """`candidates` with what they would load, and the same by row. Where no pod loads anything,
    `candidates` itself."""
    loads = {
        row: load
        for row, pod in enumerate(pods.pods)
        if (load := _load(context, pod, candidates.cached_if_computing[row], now)).tokens
    }
    if not loads:
        return candidates, loads
    table, cached = candidates.pods.copy(), list(candidates.cached_if_computing)
    for row, load in loads.items():
        cached[row] += load.tokens
        figures = table.pods[row]._replace(load=load.seconds, loaded=load.tokens)
        table.write(row, figures)
    changed = Candidates(
        table,
        candidates.cached,
        cached,
        candidates.decodes,
        candidates.groups,
        candidates.max_unsplit_tokens,
    )
    return changed, loads


def _load(context: ChoiceContext, pod: Pod, cached: int, now: float) -> Load:
    precise, fit = context.precise, pod.estimates.loads
    if precise is None or fit is None or context.request is None:
        return NO_LOAD
    stored = precise.stored.get(pod.name, 0)
    if stored <= cached:
        return NO_LOAD
    # An engine computes the last token of a prompt, whatever is stored.
    stored = min(stored, context.request.prompt_tokens - 1)
    figures = pod.estimates.figures(now)
    token_bytes = fit.bytes_per_token or figures.kv.bytes(1)
    return worthwhile_load(figures, fit.best, token_bytes, cached, stored)
