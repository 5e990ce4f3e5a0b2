"""Prompts that no pod has cached go to each pod in turn."""

from tandem_epp.backends.pods import Pod
from tandem_epp.choice.context import ChoiceContext
from tandem_epp.llmd.plugins.no_hit_lru import NoHitLruScorer
from tandem_epp.request.inference import InferenceRequest

from .pods import make_pod


def place(scorer: NoHitLruScorer, pods: list[Pod], decode: Pod, prefill: Pod | None = None) -> None:
    context = ChoiceContext(None)
    scorer.score(pods, context)
    scorer.on_placed(context, decode, prefill)


def test_the_pod_whose_turn_was_longest_ago_scores_best() -> None:
    pods = [make_pod(name) for name in "abc"]
    scorer = NoHitLruScorer()
    assert scorer.score(pods, ChoiceContext(None)) == [1, 0.5, 0]
    place(scorer, pods, pods[0])
    assert scorer.score(pods, ChoiceContext(None)) == [0, 1, 0.5]
    place(scorer, pods, pods[1], pods[2])
    assert scorer.score(pods, ChoiceContext(None)) == [1, 0.5, 0]
    assert scorer.score(pods[:1], ChoiceContext(None)) == [1]
    # Ranks count pods that are no candidates now.
    assert scorer.score(pods[1:], ChoiceContext(None)) == [0, 0]


def test_a_prompt_that_some_pod_caches_takes_no_turn() -> None:
    pods = [make_pod(name) for name in "ab"]
    request = InferenceRequest("m", b"x" * 4 * 64)
    pods[1].prefixes.place(pods[1], request.chain)
    context = ChoiceContext(request, pods[1].prefixes)
    scorer = NoHitLruScorer()
    assert scorer.score(pods, context) == [0.5, 0.5]
    scorer.on_placed(context, pods[1], None)
    assert scorer.score(pods, ChoiceContext(None)) == [1, 0]


def test_turns_are_bounded() -> None:
    pods = [make_pod(name) for name in "abc"]
    scorer = NoHitLruScorer(size=1)
    for pod in pods:
        place(scorer, pods, pod)
    assert scorer.score(pods, ChoiceContext(None)) == [1, 0.5, 0], "only c had its turn"
