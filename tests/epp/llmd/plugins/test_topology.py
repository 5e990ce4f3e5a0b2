"""Prefill pods near the decode pod are preferred, and none is ruled out if all are far."""

from tandem_epp.backends.pods import Pod
from tandem_epp.choice.context import ChoiceContext
from tandem_epp.llmd.plugins.llmd_parameters import TopologyParameters
from tandem_epp.llmd.plugins.topology import Distance, TopologyFilter, TopologyScorer

from .pods import make_pod

KEYS = TopologyParameters()


def pod_at(name: str, host: str, rack: str = "", zone: str = "", region: str = "") -> Pod:
    places = {KEYS.hostname: host, KEYS.rack: rack, KEYS.zone: zone, KEYS.region: region}
    return make_pod(name, labels={key: value for key, value in places.items() if value})


DECODE = pod_at("decode", "h1", "r1", "z1", "g1")
PODS = [
    pod_at("host", "h1"),
    pod_at("rack", "h2", "r1", "z1", "g1"),
    pod_at("zone", "h3", "r2", "z1", "g1"),
    pod_at("region", "h4", "r3", "z2", "g1"),
    pod_at("far", "h5", "r4", "z3", "g2"),
    make_pod("unlabelled"),
]


def test_scores_fall_with_the_distance() -> None:
    context = ChoiceContext(None, peer=DECODE)
    assert TopologyScorer(KEYS).score(PODS, context) == [1, 0.2, 0.05, 0.02, 0, 0]
    assert TopologyScorer(KEYS).score(PODS, ChoiceContext(None)) == [0] * 6


def test_labels_may_have_other_names() -> None:
    keys = TopologyParameters(hostname="machine")
    pods = [make_pod("a", labels={"machine": "m"}), make_pod("b", labels={KEYS.hostname: "m"})]
    context = ChoiceContext(None, peer=pods[0])
    assert TopologyScorer(keys).score(pods, context) == [1, 0]


def test_the_filter_keeps_what_is_near_and_all_if_nothing_is() -> None:
    context = ChoiceContext(None, peer=DECODE)

    def kept(farthest: Distance, pods: list[Pod]) -> list[str]:
        return [pod.name for pod in TopologyFilter(KEYS, farthest).keep(pods, context)]

    assert kept(Distance.HOST, PODS) == ["host"]
    assert kept(Distance.RACK, PODS) == ["host", "rack"]
    assert kept(Distance.REGION, PODS) == ["host", "rack", "zone", "region"]
    assert kept(Distance.HOST, PODS[4:]) == ["far", "unlabelled"]
    assert TopologyFilter(KEYS, Distance.HOST).keep(PODS, ChoiceContext(None)) is PODS
