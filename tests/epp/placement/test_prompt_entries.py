"""Which pods count a prompt as cached, after each kind of answer."""

import pytest

from tandem_contract.config import Backend
from tandem_contract.paths import Role
from tandem_contract.prefix import text_chain
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pods import DiscoveredBackend, Pod
from tandem_epp.exchange import ResponseHeaders
from tandem_epp.placement.prompt_entries import PromptEntries
from tandem_epp.prefix.prefix_tree import PrefixTree

CHAIN = text_chain(bytes(640))


class Placed:
    """A prompt placed on a decode pod with two prefill candidates."""

    def __init__(self, *, split: bool = True) -> None:
        self.prefixes: PrefixTree[Pod] = PrefixTree()
        roles = {"d": Role.DECODE, "p1": Role.PREFILL, "p2": Role.PREFILL, "u": Role.UNIFIED}
        self.pods = {
            name: Pod(
                Backend(name=name, url=f"http://10.0.0.{i}:8000", role=role), prefixes=self.prefixes
            )
            for i, (name, role) in enumerate(roles.items())
        }
        prefill = [self.pods["p1"], self.pods["p2"]] if split else []
        self.entries = PromptEntries(self.prefixes, CHAIN, self.pods["d"], prefill)

    def names(self) -> tuple[set[str], set[str]]:
        """Pods that cache the prompt, and pods that it is on its way to."""
        match = self.prefixes.match(CHAIN)
        return {pod.name for pod in match.cached}, {pod.name for pod in match.placed}


@pytest.mark.parametrize(
    ("response", "cached"),
    [
        (ResponseHeaders(None, 200, "p1", "prefill_then_decode"), {"d", "p1"}),
        (ResponseHeaders(None, 200, "10.0.0.2:8000", "prefill_then_decode"), {"d", "p2"}),
        (ResponseHeaders(None, 200, None, "fallback"), {"d"}),
        (ResponseHeaders(None, 200, "stranger", "prefill_then_decode"), {"d"}),
        # A sidecar that says nothing followed the choice.
        (ResponseHeaders(None, 200), {"d", "p1"}),
        (ResponseHeaders(None, 500, "p1", "prefill_then_decode"), set()),
        (ResponseHeaders(None, 400), set()),
    ],
)
def test_a_prompt_counts_where_its_kv_is(response: ResponseHeaders, cached: set[str]) -> None:
    placed = Placed()
    assert placed.names() == (set(), {"d", "p1"})
    placed.entries.on_response_headers(response)
    assert placed.names() == (cached, set())
    placed.entries.withdraw()
    assert placed.names() == (cached, set())


def test_a_prompt_without_an_answer_is_forgotten() -> None:
    placed = Placed()
    placed.entries.withdraw()
    assert placed.names() == (set(), set())


def test_another_pod_than_the_chosen_one_serves() -> None:
    placed = Placed(split=False)
    placed.entries.move_decode(placed.pods["u"])
    assert placed.names() == (set(), {"u"})
    placed.entries.on_response_headers(ResponseHeaders(None, 200))
    assert placed.names() == ({"u"}, set())


def test_a_prefill_pod_that_has_left_is_credited_with_nothing() -> None:
    fleet = Fleet()
    backends = [
        DiscoveredBackend(Backend(name=name, url=f"http://10.0.0.{i}:8000", role=role))
        for i, (name, role) in enumerate(
            {"d": Role.DECODE, "p1": Role.PREFILL, "p2": Role.PREFILL}.items()
        )
    ]
    fleet.apply(backends)
    decode, first, second = fleet
    entries = PromptEntries(fleet.prefixes, CHAIN, decode, [first, second])
    fleet.apply(backends[:2])
    entries.on_response_headers(ResponseHeaders(None, 200, "p2", "prefill_then_decode"))
    assert fleet.prefixes._cached.tokens(second) == 0
    assert fleet.prefixes._cached.tokens(decode) > 0
