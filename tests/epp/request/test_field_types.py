"""Wrong types are answered with 400 and the place; what vLLM converts is read as it reads it."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_epp.exchange import HttpRequest, NotPlaced
from tandem_epp.request.body_fields import BadBody
from tandem_epp.request.inference import parse_request, read_model

from ..placement.test_picker import NOW, PickerSetup

pytestmark = pytest.mark.long

PROMPTS: dict[RequestKind, dict[str, Any]] = {
    RequestKind.COMPLETIONS: {"prompt": "Hi"},
    RequestKind.CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    RequestKind.RESPONSES: {"input": "Hi"},
    RequestKind.MESSAGES: {"messages": [{"role": "user", "content": "Hi"}]},
    RequestKind.GENERATE: {"token_ids": [1, 2]},
}


def refusal(kind: RequestKind, body: str) -> BadBody:
    with pytest.raises(BadBody) as raised:
        parse_request(kind, body.encode())
    return raised.value


WRONG = [
    *((kind, "model", "5") for kind in RequestKind),
    *((kind, "stream", value) for kind in RequestKind for value in ('"maybe"', "2", "[]", "0.5")),
    *(
        (kind, "max_output_tokens" if kind is RequestKind.RESPONSES else "max_tokens", value)
        for kind in RequestKind
        for value in ('"x"', "1.5", "{}", "1e999")
    ),
    *((RequestKind.COMPLETIONS, "prompt", value) for value in ("{}", "5", "true")),
    *((RequestKind.COMPLETIONS, "prompt", value) for value in ("[{}]", "[1, {}]", '["a", 5]')),
    *((RequestKind.COMPLETIONS, "prompt", value) for value in ("[[1], 5]", "[1.5]", "[-1]")),
    *((RequestKind.CHAT, "messages", value) for value in ("17", "{}", '"Hi"', "null", "[17]")),
    (RequestKind.CHAT, "max_completion_tokens", "{}"),
    *((RequestKind.RESPONSES, "input", value) for value in ("17", "{}", "null", '["a"]')),
    (RequestKind.RESPONSES, "max_output_tokens", "[]"),
    (RequestKind.MESSAGES, "messages", "17"),
    *((RequestKind.GENERATE, name, "17") for name in ("token_ids", "features", "content_parts")),
    (RequestKind.GENERATE, "token_ids", '["x"]'),
    (RequestKind.GENERATE, "token_ids", "[1e999]"),
    (RequestKind.GENERATE, "token_ids", "[" + "9" * 5000 + "]"),
]


@pytest.mark.parametrize(("kind", "field", "value"), WRONG)
def test_a_wrong_type_is_refused_with_its_place(kind: RequestKind, field: str, value: str) -> None:
    fields = {name: json.dumps(each) for name, each in PROMPTS[kind].items()} | {field: value}
    body = "{" + ", ".join(f'"{name}": {each}' for name, each in fields.items()) + "}"
    error = refusal(kind, body)
    assert error.param == field
    assert str(error).startswith(field)
    assert len(str(error)) < 300


def test_the_message_says_what_came_and_what_to_send() -> None:
    error = refusal(RequestKind.CHAT, '{"messages": 17}')
    assert str(error) == (
        "messages: a number (17) instead of a list of messages: send a list of messages"
    )


@pytest.mark.parametrize("field", ["n", "best_of", "prompt_logprobs"])
@pytest.mark.parametrize("number", ["1e999", "9" * 5000])
def test_a_number_beyond_all_types_is_refused(field: str, number: str) -> None:
    body = f'{{"prompt": "Hi", "{field}": {number}}}'
    assert "out of range" in str(refusal(RequestKind.COMPLETIONS, body))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *(("true", True), ("false", False), ("null", False), ("1", True), ("0.0", False)),
        *(('"yes"', True), ('"No"', False), ('"on"', True), ('"T"', True), ('"0"', False)),
    ],
)
def test_a_flag_is_read_as_the_engine_reads_it(value: str, expected: bool) -> None:
    parsed = parse_request(RequestKind.COMPLETIONS, f'{{"stream": {value}}}'.encode())
    assert parsed.is_stream is expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *(("16", 16), ("16.0", 16), ('"16"', 16), ('" 1_6 "', 16), ("1e2", 100), ("true", 1)),
        *(("null", None), ("-1", None), ("9" * 30, 999_999_999), ("1e300", 10**9)),
    ],
)
def test_a_count_is_read_as_the_engine_reads_it(value: str, expected: int | None) -> None:
    parsed = parse_request(RequestKind.COMPLETIONS, f'{{"max_tokens": {value}}}'.encode())
    assert parsed.max_tokens == expected


def test_token_ids_in_other_spellings_are_the_same_prompt() -> None:
    exact = parse_request(RequestKind.COMPLETIONS, b'{"prompt": [1, 5, 7]}')
    other = parse_request(RequestKind.COMPLETIONS, b'{"prompt": [true, "5", 7.0]}')
    assert exact.prompt == other.prompt


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        *((b'{"model": "a"}', "a"), (b'{"model": null}', None), (b'{"input": 5}', None)),
        *((b"[]", None), (b"{", None), (b'{"model": 5, "model": "b"}', "b")),
    ],
)
def test_other_requests_name_their_model(body: bytes, expected: str | None) -> None:
    assert read_model(body) == expected


def test_a_wrong_model_of_another_request_is_refused() -> None:
    with pytest.raises(BadBody, match="model: a number"):
        read_model(b'{"model": 5, "input": "Hi"}')


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.just(10**400)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["role", "content", "type", "text", "image_url"]), inner),
    ),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    [
        *(
            "model",
            "prompt",
            "messages",
            "input",
            "token_ids",
            "stream",
            "max_tokens",
            "n",
            "tools",
        ),
        *("sampling_params", "features", "content_parts", "system", "echo", "logprobs", "best_of"),
        *("max_completion_tokens", "max_output_tokens", "cache_salt", "kv_transfer_params"),
        *(
            "vllm_xargs",
            "truncation",
            "truncate_prompt_tokens",
            "previous_response_id",
            "documents",
        ),
    ]
)
BODIES = st.one_of(VALUES, st.lists(st.tuples(FIELDS, VALUES), max_size=6))


def encoded(body: Any) -> bytes:
    """JSON; a list of pairs becomes an object, in which keys may repeat."""
    if isinstance(body, list) and all(isinstance(pair, tuple) for pair in body):
        return ("{" + ",".join(f"{json.dumps(k)}:{json.dumps(v)}" for k, v in body) + "}").encode()
    return json.dumps(body).encode()


@given(st.sampled_from(RequestKind), BODIES)
@example(RequestKind.CHAT, [("messages", 17)])
@settings(deadline=None, max_examples=400)
def test_any_json_is_placed_or_refused(kind: RequestKind, body: Any) -> None:
    setup = PickerSetup(p="prefill", d="decode")
    request = HttpRequest("POST", PATHS[kind], {})
    refusal = None
    try:
        setup.picker.place(request, encoded(body), NOW).end(NOW)
    except NotPlaced as not_placed:
        refusal = not_placed.reply
    if refusal is not None:
        error = json.loads(refusal.body)["error"]
        assert error["message"]
        # Anthropic's errors have no code.
        assert kind is RequestKind.MESSAGES or error["code"] == refusal.status
        assert refusal.status in (400, 404)
    faults = setup.metrics.registry.get_sample_value("tandem_epp_faults_total", {"task": "place"})
    assert not faults
