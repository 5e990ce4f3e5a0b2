"""How much of a prompt each pod has, for all pods of a fleet at once.

`ChoiceContext` answers the same for one pod.
"""

from collections.abc import Sequence, Set

from msgspec import Struct

from ..backends.fleet_figures import FleetFigures
from ..prefix.kv_events.collector import PreciseMatch
from ..prefix.kv_events.feed import Knowledge
from .context import ChoiceContext


class PromptTokens(Struct, frozen=True):
    """Tokens of one prompt's longest prefix on each pod, by row of `FleetFigures`."""

    cached: list[int]
    """`ChoiceContext.cached_tokens` of each pod."""
    placed: list[int]
    """`ChoiceContext.placed_tokens` of each pod. The same object as `cached` where nothing alike
    is on its way to any pod."""


def prompt_tokens(context: ChoiceContext, pods: FleetFigures) -> PromptTokens:
    """What each of `pods` has of the prompt of `context`."""
    request, match, rows = context.request, context.match, pods.rows
    cached = [0] * len(pods.pods)
    if request is None:
        return PromptTokens(cached, cached)
    for group, assumed in match.groups:
        tokens = request.tokens(assumed)
        for pod in group:
            # A pod that is gone has no row.
            if (row := rows.get(pod)) is not None:
                # An engine caches no part of a block.
                cached[row] = tokens - tokens % pod.block_tokens
    if context.precise is None and not match.placed:
        return PromptTokens(cached, cached)
    placed, coming = cached.copy(), set()
    for pod, assumed in match.placed.items():
        row = rows.get(pod)
        if row is not None and assumed > match.cached_tokens(pod):
            tokens = request.tokens(assumed)
            placed[row] = tokens - tokens % pod.block_tokens
            coming.add(row)
    if context.precise is not None:
        _apply_events(context.precise, pods.names, cached, placed, coming)
    return PromptTokens(cached, placed)


def _apply_events(
    precise: PreciseMatch,
    names: Sequence[str],
    cached: list[int],
    placed: list[int],
    coming: Set[int],
) -> None:
    """Correct the pods of which KV events tell; see `ChoiceContext.placed_tokens`. `coming`: rows
    to which more of the prompt is on its way than they have."""
    prefixes = precise.blocks.prefixes
    for row, name in enumerate(names):
        known = precise.knowledge.get(name, Knowledge.NOTHING)
        if known is Knowledge.NOTHING:
            continue
        exact = prefixes[name].total if name in prefixes else 0
        if known is Knowledge.WHOLE:
            cached[row] = exact
            placed[row] = max(placed[row], exact) if row in coming else exact
        else:
            cached[row], placed[row] = max(cached[row], exact), max(placed[row], exact)
