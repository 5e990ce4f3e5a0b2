"""What separates prompts in the prefix index, and where."""

import json

import pytest

from tandem_contract.prefix import FINE_TOKENS
from tandem_contract.request_kinds import RequestKind
from tandem_epp.request.inference import InferenceRequest, parse_request
from tandem_epp.request.prompt_key import SALT_FIELDS

TEXT = "hello " * 50


def parsed(kind: RequestKind, **fields: object) -> InferenceRequest:
    return parse_request(kind, json.dumps({"model": "m", **fields}).encode())


def chat(**fields: object) -> InferenceRequest:
    return parsed(RequestKind.CHAT, messages=[{"role": "user", "content": TEXT}], **fields)


def shared(first: InferenceRequest, second: InferenceRequest) -> int:
    return sum(a == b for a, b in zip(first.chain, second.chain, strict=False))


@pytest.mark.parametrize("field", SALT_FIELDS)
def test_what_is_used_anywhere_in_the_prompt_separates_from_the_first_block_on(field: str) -> None:
    assert shared(chat(), chat(**{field: {"effort": "low"}})) == 0
    assert shared(chat(**{field: "a"}), chat(**{field: "b"})) == 0
    assert shared(chat(**{field: "a"}), chat(**{field: "a"})) == len(chat().chain)
    assert shared(chat(), chat(**{field: None})) == len(chat().chain)


def test_a_lora_adapter_is_a_model_of_its_own() -> None:
    assert shared(chat(), chat(model="m-lora")) == 0


@pytest.mark.parametrize("field", ["temperature", "max_tokens", "tool_choice", "user", "stream"])
def test_what_the_prompt_does_not_depend_on_does_not_separate(field: str) -> None:
    assert shared(chat(), chat(**{field: 1})) == len(chat().chain)


@pytest.mark.parametrize(
    ("kind", "turns", "fields"),
    [
        (RequestKind.CHAT, "messages", ["tools", "documents"]),
        (RequestKind.RESPONSES, "input", ["instructions", "tools"]),
        (RequestKind.MESSAGES, "messages", ["system", "tools"]),
    ],
)
def test_tools_documents_and_instructions_come_before_the_turns(
    kind: RequestKind, turns: str, fields: list[str]
) -> None:
    body: dict[str, object] = {turns: [{"role": "user", "content": TEXT}]}
    body |= {field: [{"name": field, "text": "x" * 200}] for field in fields}
    whole = parsed(kind, **body)
    before = [
        shared(whole, parsed(kind, **{**body, name: [{"content": "o"}]}))
        for name in (*fields, turns)
    ]
    assert before == sorted(before)
    assert before[0] == 0 < before[1] < before[2] < len(whole.chain)


def generate(image: str, **place: int) -> InferenceRequest:
    features = {"mm_hashes": {"image": [image]}, "mm_placeholders": {"image": [place]}}
    return parsed(RequestKind.GENERATE, token_ids=[7] * 160, features=features)


@pytest.mark.parametrize(
    ("kind", "turns", "field"),
    [
        (RequestKind.CHAT, "messages", "tools"),
        (RequestKind.CHAT, "messages", "documents"),
        (RequestKind.RESPONSES, "input", "instructions"),
        (RequestKind.MESSAGES, "messages", "system"),
    ],
)
def test_null_before_the_turns_is_the_same_as_nothing(
    kind: RequestKind, turns: str, field: str
) -> None:
    body = {turns: [{"role": "user", "content": TEXT}]}
    without, null = parsed(kind, **body), parsed(kind, **body, **{field: None})
    assert shared(without, null) == len(without.chain) > 0


def test_media_of_a_generate_request_enter_at_their_placeholder() -> None:
    blocks = 160 // FINE_TOKENS
    first, second = (generate(image, offset=40, length=20) for image in "ab")
    assert shared(first, second) == 40 // FINE_TOKENS
    assert shared(first, generate("a", offset=40, length=20)) == blocks
    assert first.prompt_tokens == 160
    # A placeholder outside the prompt is the engine's error to report.
    assert (
        shared(generate("a", offset=150, length=20), generate("b", offset=-1, length=9)) == blocks
    )
    nothing = parsed(RequestKind.GENERATE, token_ids=[7] * 160, features=None)
    assert shared(nothing, generate("a", offset=40, length=1)) == 40 // FINE_TOKENS
