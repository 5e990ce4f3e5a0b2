"""The settings of the choice by cost."""

from collections.abc import Mapping
from random import Random

import pytest

from tandem_contract.config import Backend, DisaggregatedServing
from tandem_contract.paths import Role
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pods import DiscoveredBackend
from tandem_epp.choice.context import ChoiceContext
from tandem_epp.choice.cost_choice import CostSettings
from tandem_epp.choice.routing import Routing, Scheduling
from tandem_epp.choice.scheduler import Scheduler
from tandem_planner.kv_size import KvSize

A, B = KvSize(1e5), KvSize(2e5)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"a": A, "b": B}, {"lists-b": B, "lists-c": None, "lists-none": None}),
        ({"a": A}, {"lists-b": None, "lists-c": None, "lists-none": A}),
    ],
)
def test_a_pod_has_the_kv_size_of_its_model_or_the_only_one_if_it_lists_none(
    sizes: Mapping[str, KvSize], expected: Mapping[str, KvSize | None]
) -> None:
    fleet = Fleet()
    models = {"lists-b": ("b",), "lists-c": ("c",), "lists-none": ()}
    fleet.apply(
        DiscoveredBackend(
            Backend(name=name, url=f"http://10.0.0.{i}:8000", role=Role.UNIFIED, models=listed)
        )
        for i, (name, listed) in enumerate(models.items(), 1)
    )
    routing = Routing(DisaggregatedServing(), Scheduling(CostSettings(kv=sizes)))
    context = ChoiceContext(None, fleet.prefixes, None, now=100.0)
    Scheduler(fleet, routing, Random(0)).schedule(context, None, None, 100.0)
    assert {pod.name: pod.estimates.kv for pod in fleet} == expected
