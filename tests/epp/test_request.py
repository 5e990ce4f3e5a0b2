"""Parsing: prompts, prefixes, what keeps a request on one engine, and bad bodies."""

import json

import pytest

from tandem_contract.prefix import text_chain, token_bytes
from tandem_epp.request import BadRequest, InferenceRequest, Kind, parse_request


def completion(**fields: object) -> InferenceRequest:
    body = {"model": "m", **fields}
    return parse_request(Kind.COMPLETIONS, json.dumps(body).encode())


def chat(*contents: object, **fields: object) -> InferenceRequest:
    messages = [{"role": "user", "content": content} for content in contents]
    body = {"model": "m", "messages": messages, **fields}
    return parse_request(Kind.CHAT, json.dumps(body).encode())


def shared(first: InferenceRequest, second: InferenceRequest, block: int = 4) -> int:
    pairs = zip(first.chain(block), second.chain(block), strict=False)
    return sum(a == b for a, b in pairs)


def test_text_is_estimated_and_token_ids_are_exact() -> None:
    assert completion(prompt="x" * 400).prompt_tokens == 100
    assert completion(prompt="x" * 401).prompt_tokens == 101
    ids = list(range(70))
    exact = completion(prompt=ids)
    assert exact.prompt_tokens == 70
    assert exact.chain(16) == text_chain(token_bytes(ids), 64, b"m")


def test_prompts_share_the_chain_of_their_common_prefix() -> None:
    base = "the same long beginning " * 10
    assert shared(completion(prompt=base + "a"), completion(prompt=base + "b")) == 15
    assert shared(completion(prompt=base), completion(prompt=base, model="other")) == 0


def test_the_turns_of_a_conversation_share_their_prefix() -> None:
    first, second = chat("hello " * 50), chat("hello " * 50, "an answer", "and on")
    assert shared(first, second) == len(first.chain(4))
    assert shared(first, chat("hello " * 50, tools=[{"type": "function"}])) == 0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": "x"}, None),
        ({"prompt": ["x"]}, None),
        ({"prompt": [[1, 2]]}, None),
        ({"prompt": ["x", "y"]}, "batch"),
        ({"prompt": [[1], [2]]}, "batch"),
        ({"prompt": "x", "n": 2}, "n"),
        ({"prompt": "x", "n": 1, "best_of": None, "echo": False}, None),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "prompt_logprobs": 0}, "prompt_logprobs"),
    ],
)
def test_what_one_engine_must_do(fields: dict[str, object], reason: str | None) -> None:
    assert completion(**fields).one_engine == reason


def test_media_keep_a_chat_on_one_engine_and_words_about_them_do_not() -> None:
    assert chat([{"type": "image_url", "image_url": {"url": "x"}}]).one_engine == "multimodal"
    assert chat('{"image_url": "x"}').one_engine is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"model": }', r"not JSON: .*\(byte 10\)"),
        (b'{"model": "m", "prompt": "x', r"not JSON: .*\(byte 27\)"),
        (b"", r"not JSON: .*\(byte 0\)"),
        (b"[1]", "Expected `object`"),
        (b'{"model": 1}', r"Expected `str \| null`, got `int` - at `\$.model`"),
        (b'{"model": "m", "prompt": [1, "x"]}', "Expected `int`"),
        (b'{"model": "m", "prompt": [-1]}', "token ids are whole numbers"),
        (b'{"model": "\xff"}', "UTF-8"),
    ],
)
def test_a_bad_body_says_what_and_where(body: bytes, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        parse_request(Kind.COMPLETIONS, body)


def test_what_engines_judge_is_left_to_them() -> None:
    assert parse_request(Kind.COMPLETIONS, b"{}").model is None
    assert parse_request(Kind.CHAT, b'{"messages": 7}').prompt_tokens == 1
