"""What scorers hear of a prompt that the precise index knows in part, wholly or not at all."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract.config import Backend
from tandem_contract.request_kinds import RequestKind
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pods import DiscoveredBackend, Pod
from tandem_epp.choice.context import ChoiceContext
from tandem_epp.choice.prompt_tokens import prompt_tokens
from tandem_epp.llmd.plugins.scorers import PrefixCacheScorer
from tandem_epp.prefix.blocks import BlockMatch, CachedPrefix
from tandem_epp.prefix.kv_events.collector import PreciseMatch
from tandem_epp.prefix.kv_events.feed import Knowledge
from tandem_epp.request.inference import InferenceRequest, parse_request

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
    context = ChoiceContext(_request(), fleet.prefixes, _match(knowledge, 320))
    # The approximation, in blocks of the index and true tokens, covers nearly the whole prompt.
    assert context.cached_tokens(pod) == pytest.approx(cached, abs=40)
    assert context.placed_tokens(pod) == pytest.approx(placed, abs=40)
    (score,) = PrefixCacheScorer().score([pod], context)
    assert score == context.placed_tokens(pod) / EXACT_TOKENS
    _check_all_at_once(context, fleet)


def _check_all_at_once(context: ChoiceContext, fleet: Fleet) -> None:
    tokens = prompt_tokens(context, fleet.figures)
    assert list(tokens.cached) == [context.cached_tokens(pod) for pod in fleet]
    assert list(tokens.placed) == [context.placed_tokens(pod) for pod in fleet]


@given(st.data())
def test_all_pods_at_once_have_what_each_has(data: st.DataObject) -> None:
    fleet, request = Fleet(), _request()
    fleet.apply(
        DiscoveredBackend(Backend(name=name, url="http://10.0.0.1:8000"), uid=name)
        for name in "abcd"
    )
    names = st.sampled_from("abcd")
    pods, gone = list(fleet), data.draw(st.booleans())
    for pod in pods:
        pod.block_tokens = data.draw(st.sampled_from([16, 32, 50]))
        for is_answered in data.draw(st.lists(st.booleans(), max_size=2)):
            blocks = data.draw(st.integers(0, len(request.chain)))
            entry = fleet.prefixes.place(pod, request.chain[:blocks])
            if is_answered:
                fleet.prefixes.confirm(entry)
    precise = PreciseMatch(
        EXACT_TOKENS,
        BlockMatch(
            data.draw(st.dictionaries(names, st.integers(1, 9).map(lambda n: CachedPrefix(n * 16))))
        ),
        data.draw(st.dictionaries(names, st.sampled_from(Knowledge))),
    )
    match = fleet.prefixes.match(request.chain)
    if gone:
        # Between the look-up and the decision.
        fleet.apply([DiscoveredBackend(pod.backend, uid=pod.name) for pod in pods[1:]])
    context = ChoiceContext(request, None, data.draw(st.sampled_from([None, precise])))
    context._match = match
    _check_all_at_once(context, fleet)


def test_a_prompt_without_tokens_is_matched_approximately() -> None:
    fleet, pod = _fleet()
    request = parse_request(RequestKind.COMPLETIONS, json.dumps({"prompt": TEXT}).encode())
    fleet.prefixes.confirm(fleet.prefixes.place(pod, request.chain))
    context = ChoiceContext(request, fleet.prefixes)
    assert context.cached_tokens(pod) == pytest.approx(request.prompt_tokens, abs=40)
