"""The search: what it finds, what it refuses, and how its plans hold."""

from random import Random

import pytest

from tandem_planner.fabrics import Fabric
from tandem_planner.simulation.measures import Slo
from tandem_planner.simulation.work import Request
from tandem_planner.sizing.deployments import CannotServe, Estimate
from tandem_planner.sizing.gpus import GPUS
from tandem_planner.sizing.search import DECODE, PREFILL, Search, Target, Workload

from .test_models_on_gpus import shape


def workload(prompt: int, output: int, count: int = 1000) -> Workload:
    random, at, requests = Random(1), 0.0, []
    for _ in range(count):
        at += random.expovariate(1.0)
        lengths = (1 + int(random.uniform(0.5, 1.5) * mean) for mean in (prompt, output))
        requests.append(Request(at, *lengths))
    return Workload(requests, seconds=15.0, least=250)


def search(
    slo: Slo, prompt: int = 2000, output: int = 100, *, model: str = "llama-3.1-8b",
    gpu: str = "h100", fabric: Fabric = Fabric.RDMA, attainment: float = 0.9,
) -> Search:  # fmt: skip
    estimate = Estimate(shape(model), GPUS[gpu], fabric)
    return Search(estimate, workload(prompt, output), Target(slo, attainment))


@pytest.mark.long
def test_the_cheapest_plans_meet_the_objective_and_spare_no_pod() -> None:
    found = search(Slo(ttft=1.0, itl=0.03))
    plans = found.cheapest(10.0)
    assert [plan.deployment.gpus for plan in plans] == sorted(p.deployment.gpus for p in plans)
    assert {plan.deployment.prefill is None for plan in plans} == {True, False}
    for plan in plans:
        assert plan.served.measures.attainment >= 0.9
        for fewer in (plan.without_prefill, plan.without_decode):
            assert fewer is None or fewer.measures.attainment < 0.9 or fewer.measures.growth > 0.05


@pytest.mark.long
def test_the_most_of_given_gpus_is_within_them_and_more_than_that_misses() -> None:
    found = search(Slo(ttft=1.0, itl=0.03))
    plans = found.most(6)
    best = plans[0]
    assert best.deployment.gpus <= 6
    assert best.rate >= plans[-1].rate > 0
    assert best.served.measures.attainment >= 0.9
    assert found.serve(best.deployment, 1.3 * best.rate).measures.attainment < 0.9


@pytest.mark.long
def test_long_prompts_want_prefill_pods_and_long_answers_decode_pods() -> None:
    def gpus(prompt: int, output: int) -> tuple[int, int]:
        plans = search(Slo(ttft=2.0, itl=0.02), prompt, output).cheapest(10.0)
        split = next(plan.deployment for plan in plans if plan.deployment.prefill)
        assert split.prefill is not None
        return split.prefill.gpus, split.decode.gpus

    prefills, decodes = gpus(8000, 50)
    assert prefills > decodes
    prefills, decodes = gpus(200, 3000)
    assert prefills < decodes


@pytest.mark.long
def test_a_tight_itl_separates_pools() -> None:
    # A chunk beside the decodes takes longer than this, and small ones waste prefill.
    plans = search(Slo(ttft=2.0, itl=0.012), 6000, 100).cheapest(10.0)
    assert plans[0].deployment.prefill is not None


@pytest.mark.long
def test_worse_assumptions_want_no_fewer_gpus() -> None:
    found = search(Slo(ttft=1.0, itl=0.03))
    plan = found.cheapest(10.0)[0]
    bounds = found.bounds(plan)
    assert bounds.fewest <= plan.deployment.gpus
    assert bounds.most is None or bounds.most >= plan.deployment.gpus
    assert bounds.best.measures.ttft_p50 < plan.served.measures.ttft_p50
    assert plan.served.measures.ttft_p50 < bounds.worst.measures.ttft_p50


def test_what_does_not_fit_is_refused_with_bytes() -> None:
    with pytest.raises(CannotServe, match=r"8 × L40S 48 GB have 43\.2 GB each .* 84\.\d GB for we"):
        search(Slo(ttft=1.0), model="deepseek-v3", gpu="l40s").cheapest(1.0)


def test_too_few_gpus_are_refused() -> None:
    with pytest.raises(CannotServe, match="1 GPUs are fewer"):
        search(Slo(ttft=2.0), model="llama-3.3-70b").most(1)


def test_a_fabric_that_a_gpu_lacks_is_refused() -> None:
    found = search(Slo(ttft=1.0), gpu="l40s", fabric=Fabric.NVLINK)
    with pytest.raises(CannotServe, match="no NVLink"):
        found.cheapest(1.0)


def test_an_slo_below_one_step_is_impossible() -> None:
    reason = search(Slo(itl=0.0001)).impossible()
    assert reason is not None
    assert reason.startswith("itl is below one decode step, ")
    reason = search(Slo(ttft=0.001)).impossible()
    assert reason is not None
    assert reason.startswith("ttft is below the prefill of ")
    assert search(Slo(ttft=1.0, itl=0.05)).impossible() is None


def test_links_add_up_over_gpus_but_for_tcp() -> None:
    estimate = Estimate(shape("llama-3.3-70b"), GPUS["h100"], Fabric.RDMA)
    one, four = estimate.transfer(1, 8), estimate.transfer(8, 4)
    assert one.per_byte == pytest.approx(1 / (50e9 * 0.8))
    assert four.per_byte == pytest.approx(one.per_byte / 4)
    tcp = Estimate(shape("llama-3.3-70b"), GPUS["h100"], Fabric.TCP).transfer(8, 8)
    assert tcp.per_byte == pytest.approx(1 / 1e9)


def test_pods_that_fit_have_room_for_the_longest_request() -> None:
    estimate = Estimate(shape("llama-3.3-70b"), GPUS["h100"], Fabric.RDMA)
    assert estimate.tensor_sizes(PREFILL, 10_000) == [4, 8]
    assert estimate.tensor_sizes(DECODE, 1_000_000) == [8]


@pytest.mark.long
def test_without_a_ttft_pods_keep_up_all_the_same() -> None:
    plans = search(Slo(itl=0.05), 4000, 20).cheapest(20.0)
    for plan in plans:
        assert plan.served.measures.growth <= 0.05
        assert plan.served.measures.ttft_p99 < 5.0


def test_over_nvlink_a_pair_of_pods_shares_a_node() -> None:
    def sizes(fabric: Fabric) -> set[int]:
        kinds = search(Slo(ttft=1.0), model="llama-3.3-70b", fabric=fabric)._kinds()
        return {k.prefill.tensor + k.decode.tensor for k in kinds if k.prefill}

    assert sizes(Fabric.NVLINK) == {8}
    assert sizes(Fabric.RDMA) == {8, 12, 16}
