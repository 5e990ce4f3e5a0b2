"""Parsing of bodies: prompts, prefixes, what keeps a request on one engine, and invalid bodies."""

import json

import pytest

from tandem_contract.prefix import text_chain, token_bytes
from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_epp.exchange import HttpRequest
from tandem_epp.request import body_fields
from tandem_epp.request.bodies import kind_of
from tandem_epp.request.body_fields import BadBody
from tandem_epp.request.inference import InferenceRequest, parse_request, read_model

DEEP = b"[" * 100_000
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
INLINE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def parsed(kind: RequestKind, **fields: object) -> InferenceRequest:
    return parse_request(kind, json.dumps({"model": "m", **fields}).encode())


def completion(**fields: object) -> InferenceRequest:
    return parsed(RequestKind.COMPLETIONS, **fields)


def chat(*contents: object, **fields: object) -> InferenceRequest:
    messages = [{"role": "user", "content": content} for content in contents]
    return parsed(RequestKind.CHAT, messages=messages, **fields)


def shared(first: InferenceRequest, second: InferenceRequest) -> int:
    """Number of leading blocks that both chains have in common."""
    return sum(a == b for a, b in zip(first.chain, second.chain, strict=False))


def test_text_length_is_estimated_and_token_ids_are_counted() -> None:
    assert completion(prompt="x" * 400).prompt_tokens == 100
    assert completion(prompt="x" * 401).prompt_tokens == 101
    ids = list(range(70))
    exact = completion(prompt=ids)
    assert exact.prompt_tokens == 70
    assert exact.chain == text_chain(token_bytes(ids), b"m")


def test_of_a_repeated_key_the_last_one_counts_as_in_the_engine() -> None:
    body = b'{"model": 7, "prompt": [1], "prompt": "%b", "n": "x", "n": 1, "model": "m"}'
    text = b"the last prompt " * 20
    repeated = parse_request(RequestKind.COMPLETIONS, body % text)
    assert (repeated.model, repeated.chain) == ("m", completion(prompt=text.decode()).chain)
    assert read_model(b'{"model": "a", "other": {}, "model": "b"}') == "b"
    with pytest.raises(BadBody, match="prompt"):
        parse_request(RequestKind.COMPLETIONS, b'{"model": "m", "prompt": "x", "prompt": 17}')


def test_prompts_share_the_chain_of_their_common_prefix() -> None:
    base = "the same long beginning " * 10
    assert shared(completion(prompt=base + "a" * 64), completion(prompt=base + "b" * 64)) == 3
    assert shared(completion(prompt=base), completion(prompt=base, model="other")) == 0


def test_the_turns_of_a_conversation_share_their_prefix() -> None:
    first, second = chat("hello " * 50), chat("hello " * 50, "an answer", "and on")
    assert shared(first, second) == len(first.chain)
    assert shared(first, chat("hello " * 50, tools=[{"type": "function"}])) == 0


@pytest.mark.parametrize(
    ("kind", "context", "turns"),
    [
        (RequestKind.RESPONSES, {"instructions": "be brief"}, "input"),
        (RequestKind.MESSAGES, {"system": "be brief"}, "messages"),
        (RequestKind.MESSAGES, {"tools": [{"name": "search"}]}, "messages"),
    ],
)
def test_instructions_tools_and_turns_are_the_prompt(
    kind: RequestKind, context: dict[str, object], turns: str
) -> None:
    first_turn = {"role": "user", "content": "hello " * 50}
    first = parsed(kind, **context, **{turns: [first_turn]})
    second = parsed(kind, **context, **{turns: [first_turn, {"role": "assistant"}]})
    assert len(first.chain) > 4
    assert shared(first, second) == len(first.chain)
    assert shared(first, parsed(kind, **{turns: [first_turn]})) == 0


def test_token_ids_of_a_generate_request_hash_like_those_of_a_completion() -> None:
    ids = list(range(64))
    generate = parsed(RequestKind.GENERATE, token_ids=ids)
    assert generate.prompt_tokens == 64
    assert generate.chain == completion(prompt=ids).chain
    assert parsed(RequestKind.GENERATE).prompt_tokens == 0


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
        ({"prompt": "x", "echo": True}, None),
        ({"prompt": "x", "echo": True, "logprobs": 1}, "echo_logprobs"),
        ({"prompt": "x", "prompt_logprobs": 0}, "prompt_logprobs"),
    ],
)
def test_completions_that_one_engine_must_serve(
    fields: dict[str, object], reason: str | None
) -> None:
    assert completion(**fields).single_engine_reason == reason


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        (RequestKind.CHAT, {"messages": [], "echo": True}, "echo_logprobs"),
        (RequestKind.RESPONSES, {"input": "x", "previous_response_id": "r"}, "previous_response"),
        (RequestKind.RESPONSES, {"input": "x", "tools": [{"type": "mcp"}]}, "builtin_tools"),
        (RequestKind.RESPONSES, {"input": "x", "tools": [{"type": "function"}]}, None),
        (RequestKind.MESSAGES, {"messages": [{"content": [IMAGE]}]}, "media_by_url"),
        (RequestKind.GENERATE, {"token_ids": [1], "sampling_params": {"n": 2}}, "n"),
        (RequestKind.GENERATE, {"token_ids": [1], "sampling_params": {"n": 1}}, None),
    ],
)
def test_the_same_rules_hold_for_every_kind(
    kind: RequestKind, fields: dict[str, object], reason: str | None
) -> None:
    assert parsed(kind, **fields).single_engine_reason == reason


def test_media_by_url_keep_a_chat_on_one_engine_and_inline_media_do_not() -> None:
    assert chat([IMAGE]).single_engine_reason == "media_by_url"
    assert chat([INLINE]).single_engine_reason is None
    assert chat('{"image_url": "x"}').single_engine_reason is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"model": }', r"not JSON: .*\(byte 10\)"),
        (b'{"model": "m", "prompt": "x', r"not JSON: .*\(byte 27\)"),
        (b"", r"not JSON: .*\(byte 0\)"),
        (b"[1]", "Expected `object`"),
        (b'{"model": 1}', r"model: a number"),
        (b'{"model": "m", "prompt": [1, "x"]}', r"prompt\[1\]: a text \(\"x\"\) instead"),
        (b'{"model": "m", "prompt": [-1]}', "prompt: token ids are whole numbers"),
        (b'{"model": "\xff"}', "UTF-8"),
        (rb'{"model": "\ud800"}', r"half of a surrogate pair \(\\ud800, byte 11\)"),
        (rb'{"model": "\\\\\uDC00"}', r"half of a surrogate pair \(\\uDC00, byte 15\)"),
        (rb'{"prompt": "\ud83d\ude00 \ud83dx"}', r"half .* \(\\ud83d, byte 25\)"),
        (rb'{"model": "\\\\ud800", 5}', r"not JSON: .*\(byte \d+\)"),
    ],
)
def test_an_invalid_body_is_refused_with_the_place(body: bytes, message: str) -> None:
    with pytest.raises(BadBody, match=message):
        parse_request(RequestKind.COMPLETIONS, body)


@pytest.mark.parametrize("kind", RequestKind)
@pytest.mark.parametrize("member", ["messages", "prompt", "input", "token_ids", "n", "other"])
def test_a_body_nested_too_deeply_is_refused_with_the_place(kind: RequestKind, member: str) -> None:
    head = b'{"model": "m", "%s": ' % member.encode()
    for body in (head + DEEP, head + DEEP + b"]" * len(DEEP) + b"}"):
        with pytest.raises(BadBody, match=r"nested too deeply \(byte \d+\)") as refusal:
            parse_request(kind, body)
        place = int(str(refusal.value).partition("(byte ")[2].rstrip(")"))
        assert len(head) < place < len(head) + 2000


def test_nesting_near_the_parsers_limit_is_read_or_refused() -> None:
    """A rule on media decodes what the parser only skips, with less stack left."""
    refusals = 0
    depths = range(700, 1100)
    for depth in depths:
        nested = b"[" * depth + b"]" * depth
        try:
            parse_request(RequestKind.CHAT, b'{"messages": [{"image_url": %s}]}' % nested)
        except BadBody as err:
            assert str(err).startswith("the body is nested too deeply")  # noqa: PT017
            refusals += 1
    assert 0 < refusals < len(depths)


def test_the_model_of_any_json_is_read_and_deep_nesting_refused() -> None:
    assert read_model(b'{"model": "m", "input": "x"}') == "m"
    assert read_model(b"{}") is None
    assert read_model(b"not JSON") is None
    with pytest.raises(BadBody, match=r"nested too deeply \(byte \d+\)"):
        read_model(b'{"input": ' + DEEP)


def test_what_only_the_engine_can_judge_is_accepted() -> None:
    assert parse_request(RequestKind.COMPLETIONS, b"{}").model is None
    assert parse_request(RequestKind.GENERATE, b'{"sampling_params": 7}').prompt_tokens == 0


@pytest.mark.parametrize("kind", RequestKind)
def test_the_kind_follows_from_path_and_method_whatever_the_content_type(kind: RequestKind) -> None:
    path = PATHS[kind]
    assert kind_of(HttpRequest("POST", f"{path}?x=1", {})) is kind
    for content_type in ("Application/JSON; charset=utf-8", "text/plain", "multipart/form-data"):
        assert kind_of(HttpRequest("POST", path, {"content-type": content_type})) is kind
    assert kind_of(HttpRequest("GET", path, {})) is None


@pytest.mark.parametrize(
    ("kind", "member"),
    [
        (RequestKind.RESPONSES, '"kv_transfer_params": {}'),
        (RequestKind.MESSAGES, '"vllm_xargs": {}'),
        (RequestKind.GENERATE, '"sampling_params": {"extra_args": {}}'),
    ],
)
def test_fields_that_only_a_sidecar_removes_are_noticed(kind: RequestKind, member: str) -> None:
    assert parse_request(kind, b"{%s}" % member.encode()).needs_sidecar
    assert not parsed(kind).needs_sidecar


def test_the_place_of_nesting_is_searched_in_the_beginning_of_a_body_only() -> None:
    body = b'{"prompt": "%s", "deep": %s' % (b"x" * 100_000, b"[" * 100_000)
    with pytest.raises(BadBody, match=r"nested too deeply \(after byte 65536\)"):
        parse_request(RequestKind.COMPLETIONS, body)


def test_the_search_for_the_place_decodes_no_more_than_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    def is_too_deep(part: bytes | memoryview) -> bool:
        sizes.append(len(part))
        return len(part) > 1000

    monkeypatch.setattr(body_fields, "_is_too_deep", is_too_deep)
    with pytest.raises(BadBody, match=r"byte 1000\)"):
        parse_request(RequestKind.CHAT, b'{"messages": ' + b"[" * 10_000_000)
    assert max(sizes) <= 65536
    assert len(sizes) < 20
