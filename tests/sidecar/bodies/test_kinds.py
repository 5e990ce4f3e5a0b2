"""Which requests generate text, and which of them one engine must serve alone."""

import pytest

from tandem_contract.request_kinds import RequestKind as Kind
from tandem_sidecar.bodies.kinds import kind_of, single_engine_reason
from tandem_sidecar.bodies.parse import BadBody, parse_body


@pytest.mark.parametrize(
    ("method", "target", "kind"),
    [
        (b"POST", b"/v1/completions", Kind.COMPLETIONS),
        (b"POST", b"/v1/chat/completions?x=1", Kind.CHAT),
        (b"POST", b"/v1/responses", Kind.RESPONSES),
        (b"POST", b"/v1/messages", Kind.MESSAGES),
        (b"POST", b"/inference/v1/generate", Kind.GENERATE),
        (b"GET", b"/v1/completions", None),
        (b"GET", b"/v1/responses/resp_1", None),
        (b"POST", b"/v1/responses/resp_1/cancel", None),
        (b"POST", b"/v1/completions/", None),
        (b"POST", b"/v1/messages/count_tokens", None),
        (b"POST", b"/v1/embeddings", None),
    ],
)
def test_the_path_of_a_post_gives_the_kind(method: bytes, target: bytes, kind: Kind | None) -> None:
    assert kind_of(method, target) is kind


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (Kind.COMPLETIONS, '{"prompt": "x"}', None),
        (Kind.COMPLETIONS, '{"prompt": "x", "n": 1, "best_of": null, "echo": false}', None),
        (Kind.COMPLETIONS, '{"prompt": "x", "n": 2}', "n"),
        (Kind.COMPLETIONS, '{"prompt": "x", "n": "2"}', "n"),
        (Kind.COMPLETIONS, '{"prompt": "x", "best_of": 3}', "best_of"),
        (Kind.COMPLETIONS, '{"prompt": "x", "use_beam_search": true}', "beam_search"),
        (Kind.COMPLETIONS, '{"prompt": "x", "prompt_logprobs": 0}', "prompt_logprobs"),
        (Kind.COMPLETIONS, '{"prompt": "x", "echo": true, "logprobs": 0}', "echo_logprobs"),
        (Kind.COMPLETIONS, '{"prompt": "x", "echo": true}', None),
        (Kind.COMPLETIONS, '{"prompt": "x", "logprobs": 1}', None),
        (Kind.COMPLETIONS, '{"prompt": [ 1, 2, 3]}', None),
        (Kind.COMPLETIONS, '{"prompt": [[1, 2]]}', None),
        (Kind.COMPLETIONS, '{"prompt": ["one"]}', None),
        (Kind.COMPLETIONS, '{"prompt": [[1], [2]]}', "batch"),
        (Kind.COMPLETIONS, '{"prompt": [\n "one", "two"]}', "batch"),
        (Kind.COMPLETIONS, '{"prompt": []}', None),
        (Kind.COMPLETIONS, '{"prompt_embeds": "AAAA"}', "prompt_embeds"),
        (Kind.COMPLETIONS, '{"prompt": "x", "truncate_prompt_tokens": -1}', "truncation"),
        (Kind.COMPLETIONS, '{"prompt": "x", "truncate_prompt_tokens": 100}', None),
        (Kind.CHAT, '{"messages": [], "prompt_logprobs": 1}', "prompt_logprobs"),
        (Kind.CHAT, '{"messages": [], "echo": true}', "echo_logprobs"),
        (Kind.CHAT, '{"messages": [], "logprobs": true, "top_logprobs": 3}', None),
        (Kind.CHAT, '{"messages": [], "previous_response_id": "r"}', "previous_response"),
        (Kind.RESPONSES, '{"input": "x", "previous_response_id": "r"}', "previous_response"),
        (Kind.RESPONSES, '{"input": "x", "background": true}', "background"),
        (Kind.RESPONSES, '{"input": "x", "background": false, "store": true}', None),
        (Kind.RESPONSES, '{"input": "x", "truncation": "auto"}', "truncation"),
        (Kind.RESPONSES, '{"input": "x", "truncation": "disabled"}', None),
        (Kind.RESPONSES, '{"input": "x", "tools": [{"type": "function"}]}', None),
        (Kind.RESPONSES, '{"input": "x", "tools": [{"type": "custom", "name": "a"}]}', None),
        (Kind.RESPONSES, '{"input": "x", "tools": [{"type": "local_shell"}]}', None),
        (
            Kind.RESPONSES,
            '{"input": "x", "tools": [{"type": "custom"}, {"type": "code_interpreter"}]}',
            "builtin_tools",
        ),
        (Kind.RESPONSES, '{"input": "x", "tools": [{"type": ["custom"]}]}', "builtin_tools"),
        (Kind.RESPONSES, '{"input": "x", "tools": [{"type": "mcp"}]}', "builtin_tools"),
        (Kind.MESSAGES, '{"messages": [], "tools": [{"name": "f"}]}', None),
        (Kind.GENERATE, '{"token_ids": [1], "sampling_params": {"n": 2}}', "n"),
        (Kind.GENERATE, '{"token_ids": [1], "sampling_params": {"n": 1}}', None),
        (
            Kind.GENERATE,
            '{"token_ids": [1], "sampling_params": {"prompt_logprob_token_ids": [1]}}',
            "prompt_logprobs",
        ),
        (Kind.GENERATE, '{"token_ids": [1], "sampling_params": 3}', None),
    ],
)
def test_single_engine_reason(kind: Kind, text: str, reason: str | None) -> None:
    assert single_engine_reason(kind, parse_body(text.encode())) == reason


@pytest.mark.parametrize(
    ("kind", "field", "value", "remote"),
    [
        (Kind.CHAT, "messages", '[{"content": "see image_url"}]', False),
        (Kind.CHAT, "messages", '[{"content": [{"image_url": {"url": "data:x"}}]}]', False),
        (Kind.CHAT, "messages", '[{"content": [{"image_url": {"url": "http://h/i"}}]}]', True),
        (Kind.CHAT, "messages", '[{"content": [{"image_url": null, "uuid": "a"}]}]', True),
        (Kind.CHAT, "messages", r'[{"content": [{"video\u005furl": "https://h/i"}]}]', True),
        (Kind.CHAT, "messages", r'[{"content": "caf\u00e9 \u0041"}]', False),
        (Kind.CHAT, "messages", '[{"content": [{"type": "text", "url": "http://h"}]}]', False),
        (Kind.MESSAGES, "messages", '[{"content": [{"type": "url", "url": "http://h"}]}]', True),
        (Kind.MESSAGES, "messages", '[{"content": [{"source": {"type": "base64"}}]}]', False),
        (Kind.RESPONSES, "input", '[{"content": [{"image_url": "https://h/i"}]}]', True),
        (Kind.RESPONSES, "input", '[{"annotations": [{"type": "x", "url": "https://h"}]}]', False),
        (Kind.GENERATE, "content_parts", '[{"type": "image_url", "url": "http://h/i"}]', True),
        (Kind.GENERATE, "content_parts", '[{"type": "image_url", "url": "data:x"}]', False),
        (Kind.COMPLETIONS, "prompt", '"my_url"', False),
    ],
)  # fmt: skip
def test_media_that_both_engines_would_fetch(
    kind: Kind, field: str, value: str, remote: bool
) -> None:
    body = parse_body(f'{{"{field}": {value}}}'.encode())
    assert single_engine_reason(kind, body) == ("media_by_url" if remote else None)


def test_a_field_that_cannot_be_read_is_refused() -> None:
    body = parse_body(b'{"n": "\xff"}')
    with pytest.raises(BadBody):
        single_engine_reason(Kind.CHAT, body)
