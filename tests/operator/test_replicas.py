"""Pools whose user states neither `replicas` nor `scaling`: the operator writes a number."""

from typing import Any

import pytest

from .pool_yaml import DECODE, PREFILL, decode_pool
from .simulated_cluster import SimulatedCluster

SCALING = {"minReplicas": 3, "maxReplicas": 5}


def settled(*pools: dict[str, Any]) -> SimulatedCluster:
    cluster = SimulatedCluster(*pools)
    cluster.settle()
    return cluster


def replicas(cluster: SimulatedCluster) -> int | None:
    number: int | None = cluster.objects["DecodePool", "d"]["spec"].get("replicas")
    return number


def test_the_first_number_is_one_and_is_written_once() -> None:
    cluster = SimulatedCluster(PREFILL, decode_pool(replicas=None))
    plan = cluster.reconcile()
    (write,) = plan.apply_replicas
    assert (write.pool.name, write.body["spec"]) == ("d", {"replicas": 1})
    assert not cluster.plan().apply_replicas
    cluster.settle()
    assert len(cluster.of("d", ready=True)) == 1
    # The generation that the write made is reported as observed.
    generation = cluster.objects["DecodePool", "d"]["metadata"]["generation"]
    assert generation == 2
    assert cluster.status("d")["observedGeneration"] == generation


@pytest.mark.parametrize("writes", range(12))
def test_an_operator_that_dies_after_any_write_comes_to_the_same_number(writes: int) -> None:
    cluster = SimulatedCluster(PREFILL, decode_pool(replicas=None))
    cluster.reconcile(writes=writes)
    cluster.settle()
    cluster.edit("DecodePool", "d", scaling=SCALING)
    cluster.reconcile(writes=writes)
    cluster.settle()
    assert replicas(cluster) is None
    cluster.edit("DecodePool", "d", scaling=None)
    cluster.reconcile(writes=writes)
    cluster.settle()
    assert replicas(cluster) == len(cluster.of("d", ready=True)) == 3


def test_a_number_that_an_autoscaler_wrote_stays() -> None:
    cluster = settled(PREFILL, decode_pool(replicas=None))
    cluster.edit("DecodePool", "d", replicas=4)
    cluster.settle()
    assert replicas(cluster) == len(cluster.of("d", ready=True)) == 4


@pytest.mark.parametrize("number", [0, 2])
def test_a_pool_keeps_its_size_when_the_user_removes_the_number(number: int) -> None:
    cluster = settled(PREFILL, decode_pool(replicas=number))
    cluster.edit("DecodePool", "d", replicas=None)
    assert not cluster.plan().touches_pods
    cluster.settle()
    assert replicas(cluster) == len(cluster.of("d", ready=True)) == number


def test_the_operators_number_is_withdrawn_for_scaling() -> None:
    cluster = settled(PREFILL, decode_pool(replicas=None))
    cluster.edit("DecodePool", "d", scaling=SCALING)
    plan = cluster.reconcile()
    assert [write.body["spec"] for write in plan.apply_replicas] == [{}]
    cluster.settle()
    assert replicas(cluster) is None
    assert len(cluster.of("d", ready=True)) == 3


def test_a_number_of_someone_else_stays_beside_scaling_and_counts_no_more() -> None:
    cluster = settled(PREFILL, DECODE)
    cluster.edit("DecodePool", "d", scaling=SCALING)
    cluster.settle()
    assert replicas(cluster) == 2
    assert len(cluster.of("d", ready=True)) == 3


def test_a_pool_without_scaling_again_keeps_its_size() -> None:
    cluster = settled(PREFILL, decode_pool(replicas=None, scaling=SCALING))
    cluster.edit("DecodePool", "d", scaling=None)
    cluster.settle()
    assert replicas(cluster) == len(cluster.of("d", ready=True)) == 3


def test_a_pool_that_cannot_be_read_gets_its_number() -> None:
    cluster = settled(PREFILL, decode_pool(replicas=2))
    cluster.edit("DecodePool", "d", replicas=None, transfer={"requireRdma": True})
    cluster.settle()
    assert replicas(cluster) == len(cluster.of("d", ready=True)) == 2
