"""Requests that generate nothing: their lengths count, they are never split, and wrong types are
answered with 400 and the place."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_contract.paths import RoutingPath
from tandem_contract.request_kinds import POOLED_PATHS, PooledKind
from tandem_epp.exchange import HttpRequest, NotPlaced, ResponseHeaders
from tandem_epp.request import body_worker
from tandem_epp.request.bodies import kind_of
from tandem_epp.request.body_fields import BadBody
from tandem_epp.request.pooled import MAX_TOKENS, parse_pooled

from ..placement.test_picker import NOW, PickerSetup

TEXT = "x" * 400
"""100 tokens."""
IMAGE = "data:image/png;base64," + "A" * 40_000
PART = {"content": [{"type": "text", "text": TEXT}]}


def tokens(kind: PooledKind, **fields: Any) -> int:
    return parse_pooled(kind, json.dumps({"model": "m", **fields}).encode()).prompt_tokens


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        (PooledKind.INPUT, {"input": TEXT}, 100),
        (PooledKind.INPUT, {"input": [TEXT, TEXT]}, 200),
        (PooledKind.INPUT, {"input": [1, 2, 3]}, 3),
        (PooledKind.INPUT, {"input": [[1, 2, 3], [4]]}, 4),
        (PooledKind.INPUT, {"input": []}, 0),
        (PooledKind.INPUT, {}, 0),
        (PooledKind.INPUT, {"data": {"text": TEXT}}, 0),
        (PooledKind.COHERE, {"texts": [TEXT, TEXT], "images": None}, 200),
        (PooledKind.COHERE, {"images": [IMAGE, IMAGE]}, 32),
        (PooledKind.SCORE, {"text_1": TEXT, "text_2": TEXT}, 200),
        (PooledKind.SCORE, {"queries": TEXT, "documents": [TEXT, TEXT, TEXT]}, 600),
        (PooledKind.SCORE, {"data_1": [TEXT, TEXT], "data_2": [TEXT, TEXT]}, 400),
        (PooledKind.SCORE, {"queries": [TEXT], "items": [TEXT, TEXT]}, 400),
        (PooledKind.SCORE, {"queries": TEXT}, 0),
        (PooledKind.RERANK, {"query": TEXT, "documents": [TEXT, TEXT]}, 400),
        (PooledKind.RERANK, {"query": TEXT, "documents": []}, 0),
        (PooledKind.RERANK, {"query": "x" * 40_000, "documents": ["y"] * 10_000}, MAX_TOKENS),
        (PooledKind.TOKENIZE, {"prompt": TEXT}, 0),
        (PooledKind.DETOKENIZE, {"tokens": [1, 2]}, 0),
    ],
)
def test_lengths_of_prompts(kind: PooledKind, fields: dict[str, Any], expected: int) -> None:
    assert tokens(kind, **fields) == expected


@pytest.mark.parametrize(
    ("kind", "fields", "least", "most"),
    [
        (PooledKind.INPUT, {"messages": [{"role": "user", "content": TEXT}]}, 100, 120),
        (PooledKind.INPUT, {"input": [{"role": "user", "content": TEXT}]}, 100, 120),
        (PooledKind.INPUT, {"messages": [[{"role": "user", "content": TEXT}]] * 3}, 300, 360),
        (
            PooledKind.INPUT,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": IMAGE}}],
                    }
                ]
            },
            16,
            60,
        ),
        (PooledKind.COHERE, {"inputs": [PART, PART]}, 200, 250),
        (PooledKind.RERANK, {"query": TEXT, "documents": [PART, TEXT]}, 400, 440),
    ],
)
def test_lengths_of_conversations(
    kind: PooledKind, fields: dict[str, Any], least: int, most: int
) -> None:
    assert least <= tokens(kind, **fields) <= most


WRONG = [
    *((kind, "model", "5") for kind in PooledKind),
    *((PooledKind.INPUT, "input", value) for value in ("17", "{}", "null", '["a", 5]', "[1, {}]")),
    *((PooledKind.INPUT, "input", value) for value in ("[[1], 5]", "[1.5]", "[-1]", "[{}, 1]")),
    *((PooledKind.INPUT, "messages", value) for value in ('"a"', "{}", "[[1]]", "[1]")),
    *((PooledKind.COHERE, "texts", value) for value in ('"a"', "[1]", '["a", {}]')),
    *((PooledKind.COHERE, name, "{}") for name in ("images", "inputs")),
    *((PooledKind.RERANK, "documents", value) for value in ("17", "[17]", "[null]", '["a", []]')),
    *((PooledKind.RERANK, "query", value) for value in ("17", "[]", "null")),
    *((PooledKind.TOKENIZE, "prompt", value) for value in ("17", "[]", "null")),
    (PooledKind.TOKENIZE, "messages", "{}"),
    *((PooledKind.DETOKENIZE, "tokens", value) for value in ('"a"', "{}")),
    *((PooledKind.SCORE, "text_1", value) for value in ("17", "[17]", "true")),
    (PooledKind.SCORE, "documents", '["a", 5]'),
]
OTHERS = {"query": '"q"', "documents": '["d"]', "text_2": '"t"', "queries": '"q"'}


@pytest.mark.parametrize(("kind", "field", "value"), WRONG)
def test_a_wrong_type_is_refused_with_its_place(kind: PooledKind, field: str, value: str) -> None:
    fields = {"text_1" if field != "documents" else "x": '"t"', **OTHERS, field: value}
    if field == "text_1":
        # Other names of the same two lists come first.
        del fields["queries"]
    body = "{" + ", ".join(f'"{name}": {each}' for name, each in fields.items()) + "}"
    with pytest.raises(BadBody) as refusal:
        parse_pooled(kind, body.encode())
    assert refusal.value.param == field
    assert len(str(refusal.value)) < 300


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=6,
)
NAMES = st.sampled_from(
    (
        *("model", "input", "messages", "texts", "images", "inputs", "query", "documents"),
        *("queries", "text_1", "text_2", "data_1", "data_2", "prompt", "tokens", "items"),
    )
)


@settings(deadline=None, max_examples=500)
@given(st.sampled_from(PooledKind), st.dictionaries(NAMES, JSON, max_size=6))
def test_any_json_is_read_or_refused_with_the_field(kind: PooledKind, fields: Any) -> None:
    body = json.dumps(fields).encode()
    reading = body_worker.read(kind, body)
    assert reading.fault is None
    if reading.refusal is None:
        parsed = reading.request()
        assert parsed is not None
        assert 0 <= parsed.prompt_tokens <= MAX_TOKENS
    else:
        assert BadBody(reading.refusal).param in fields


@pytest.mark.parametrize("scheduling", ["{}", "plugins: [{type: always-disagg-pd-decider}]"])
def test_one_pod_computes_the_prompt_and_it_counts_there_until_the_end(scheduling: str) -> None:
    setup = PickerSetup(scheduling, d="decode", p="prefill")
    request = HttpRequest("POST", "/v1/embeddings", {})
    body = json.dumps({"model": "m", "input": [TEXT * 100] * 4}).encode()
    assert setup.picker.needs_body(request)
    placement = setup.picker.place(request, body, NOW)
    assert placement.decision.path is RoutingPath.UNIFIED
    assert placement.decision.reason == "pooling"
    assert placement.decision.prompt_tokens == 40_000
    assert [pod.name for pod in (placement.decode, *placement.prefill)] == ["d"]
    assert setup["d"].tokens_in_flight == 40_000
    placement.end(NOW)
    assert setup["d"].tokens_in_flight == 0


def test_long_inputs_go_to_different_pods() -> None:
    setup = PickerSetup(a="decode", b="decode")
    body = json.dumps({"model": "m", "input": TEXT * 100}).encode()
    request = HttpRequest("POST", "/v1/embeddings", {})
    chosen = [setup.picker.place(request, body, NOW).decode.name for _ in range(6)]
    assert sorted(chosen) == ["a", "a", "a", "b", "b", "b"]


def test_inputs_of_one_length_are_not_taken_for_one_request() -> None:
    """Their prompts are not kept: each failure counts at its pod."""
    setup = PickerSetup(a="decode", b="decode")
    request = HttpRequest("POST", "/v1/embeddings", {})
    for word in "wxyz":
        body = json.dumps({"model": "m", "input": word * 400}).encode()
        placement = setup.picker.place(request, body, NOW)
        placement.on_response_headers(ResponseHeaders(None, 500), NOW)
        placement.end(NOW)
    assert sum(setup[pod].health.failure_rate for pod in ("a", "b")) == pytest.approx(4 / 5)


def test_a_repeated_input_counts_as_cached_nowhere() -> None:
    setup = PickerSetup(d="decode")
    body = json.dumps({"model": "m", "input": TEXT * 100}).encode()
    request = HttpRequest("POST", "/pooling", {})
    for _ in range(2):
        placement = setup.picker.place(request, body, NOW)
        assert placement.decision.cached_tokens == 0
        placement.end(NOW)


def test_an_unknown_model_and_a_wrong_type_are_answered() -> None:
    setup = PickerSetup(d="decode")
    for path in POOLED_PATHS:
        for body, status, param in (
            (b'{"model": "other"}', 404, "model"),
            (b'{"model": 5}', 400, "model"),
            (b'{"model": "m"', 400, None),
        ):
            with pytest.raises(NotPlaced) as refusal:
                setup.picker.place(HttpRequest("POST", path, {}), body, NOW)
            error = json.loads(refusal.value.reply.body)["error"]
            assert (error["code"], error["param"]) == (status, param)


def test_kinds_of_paths() -> None:
    for path, pooled in POOLED_PATHS.items():
        assert kind_of(HttpRequest("POST", path + "?x=1", {})) is pooled.kind
        assert kind_of(HttpRequest("GET", path, {})) is None
