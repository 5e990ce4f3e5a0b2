"""What engines are told of a request's priority."""

import json
from time import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract.config import DisaggregatedServing, FlowControl
from tandem_contract.documents import parse_documents
from tandem_epp.exchange import HttpRequest
from tandem_epp.llmd.plugins.config import load_scheduling
from tandem_epp.request.body_fields import BadBody
from tandem_epp.request.engine_priority import with_priority
from tandem_epp.request.large_bodies import LARGE
from tandem_epp.request.objectives import Objective

from ..placement.test_picker import PickerSetup

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@given(
    st.dictionaries(st.text(max_size=8) | st.just("priority"), VALUES, max_size=4),
    st.integers(-100, 100),
    st.booleans(),
)
def test_the_engine_reads_the_negative_and_all_else_as_sent(
    body: dict[str, Any], priority: int, is_ascii: bool
) -> None:
    sent = json.dumps(body, ensure_ascii=is_ascii).encode()
    read = json.loads(with_priority(sent, priority))
    assert read.pop("priority", 0) == -priority
    assert read == {name: value for name, value in body.items() if name != "priority"}


@pytest.mark.parametrize("name", ["priority", "prior\\u0069ty"])
def test_a_client_sets_none_itself(name: str) -> None:
    for filler in ("", "x" * LARGE):
        sent = f'{{"{name}": -1000, "prompt": "{filler}"}}'.encode()
        assert json.loads(with_priority(sent, 0))["priority"] == 0
        assert json.loads(with_priority(sent, 5))["priority"] == -5


def test_a_body_stays_the_same_object_where_nothing_is_to_be_told() -> None:
    body = b'{"prompt": "a"}'
    assert with_priority(body, 0) is body
    with pytest.raises(BadBody):
        with_priority(b"[]", 1)


def scheduling(text: str = "{}", flow: FlowControl | None = None) -> Any:
    document = parse_documents(text, "router.yaml")[0]
    serving = DisaggregatedServing(enabled=True)
    return load_scheduling(document, document.data, serving, flow=flow or FlowControl())


def test_configurations_turn_it_on() -> None:
    assert not scheduling().propagates_priority
    asked = scheduling("requestHandler: {propagatePriority: true}")
    assert asked.propagates_priority
    assert not asked.notices
    assert scheduling(flow=FlowControl(enabled=True, propagate_priority=True)).propagates_priority
    assert not scheduling(flow=FlowControl(propagate_priority=True)).propagates_priority


@pytest.mark.parametrize("is_on", [True, False])
def test_the_body_that_goes_on_has_the_priority_of_the_objective(is_on: bool) -> None:
    setup = PickerSetup(d="decode", p="prefill")
    setup.picker.objectives.replace([Objective("chat", 7)])
    routing = setup.picker.routing
    changed = scheduling(f"requestHandler: {{propagatePriority: {str(is_on).lower()}}}")
    object.__setattr__(routing, "scheduling", changed)
    body = b'{"model": "m", "prompt": "hello"}'
    headers = {"x-llm-d-inference-objective": "chat", "content-length": str(len(body))}
    placement = setup.picker.place(HttpRequest("POST", "/v1/completions", headers), body, time())
    if not is_on:
        assert placement.body is None
        return
    assert placement.body is not None
    assert json.loads(placement.body)["priority"] == -7
    assert dict(placement.mutation.set)["content-length"] == str(len(placement.body))
