"""What scorers hear of a prompt that the precise index knows in part, wholly or not at all."""

import json

import pytest

from tandem_contract.config import Backend
from tandem_contract.request_kinds import RequestKind
from tandem_epp.backends.blocks import BlockMatch, CachedPrefix
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pods import DiscoveredBackend, Pod
from tandem_epp.kv_events.collector import PreciseMatch
from tandem_epp.kv_events.feed import Knowledge
from tandem_epp.request import InferenceRequest, parse_request
from tandem_epp.scheduling.profile import ScoringContext

TEXT = "word " * 400
EXACT_TOKENS = 1000
"""Twice as many as the estimate, which is one per four bytes."""


def _fleet() -> tuple[Fleet, Pod]:
    fleet = Fleet()
    fleet.apply([DiscoveredBackend(Backend(name="a", url="http://10.0.0.1:8000"))])
    return fleet, next(iter(fleet))


def _request() -> InferenceRequest:
    request = parse_request(RequestKind.COMPLETIONS, json.dumps({"prompt": TEXT}).encode())
    request.set_length(EXACT_TOKENS)
    return request


def _match(knowledge: Knowledge, cached: int) -> PreciseMatch:
    blocks = BlockMatch({"a": CachedPrefix(cached, cached)})
    return PreciseMatch(EXACT_TOKENS, blocks, {"a": knowledge})


@pytest.mark.parametrize(
    ("knowledge", "is_answered", "cached", "placed"),
    [
        # Whole knowledge: the events alone, and what is on its way.
        (Knowledge.WHOLE, True, 320, 320),
        (Knowledge.WHOLE, False, 320, 992),
        # Perhaps more is cached than the events say.
        (Knowledge.PARTIAL, True, 992, 992),
        (Knowledge.PARTIAL, False, 320, 992),
        (Knowledge.NOTHING, True, 992, 992),
        (Knowledge.NOTHING, False, 0, 992),
    ],
)
def test_events_replace_the_approximation(
    knowledge: Knowledge, is_answered: bool, cached: int, placed: int
) -> None:
    fleet, pod = _fleet()
    entry = fleet.prefixes.place(pod, _request().chain)
    if is_answered:
        fleet.prefixes.confirm(entry)
    context = ScoringContext(_request(), fleet.prefixes, _match(knowledge, 320))
    # The approximation, in blocks of the index and true tokens, covers nearly the whole prompt.
    assert context.cached_tokens(pod) == pytest.approx(cached, abs=40)
    assert context.placed_tokens(pod) == pytest.approx(placed, abs=40)
    assert context.hit_ratio(pod) == context.placed_tokens(pod) / EXACT_TOKENS


def test_a_prompt_without_tokens_is_matched_approximately() -> None:
    fleet, pod = _fleet()
    request = parse_request(RequestKind.COMPLETIONS, json.dumps({"prompt": TEXT}).encode())
    fleet.prefixes.confirm(fleet.prefixes.place(pod, request.chain))
    context = ScoringContext(request, fleet.prefixes)
    assert context.cached_tokens(pod) == pytest.approx(request.prompt_tokens, abs=40)
