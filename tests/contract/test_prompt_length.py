"""How much text a prompt has, and which cannot fit a model."""

import json
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from tandem_contract.prompt_length import PromptText, listed_length, over_length, prompt_text
from tandem_contract.request_kinds import RequestKind

COMPLETIONS, CHAT = RequestKind.COMPLETIONS, RequestKind.CHAT
RESPONSES, MESSAGES = RequestKind.RESPONSES, RequestKind.MESSAGES
_members = msgspec.json.Decoder(dict[str, Raw])
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1000}}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        (COMPLETIONS, {"prompt": "four"}, (4, 4)),
        (COMPLETIONS, {"prompt": ["four", "seven77", "x"]}, (7, 7)),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, (0, 0)),
        (COMPLETIONS, {"prompt": [[1], [1, 2]]}, (0, 0)),
        (COMPLETIONS, {"prompt": "four", "truncate_prompt_tokens": 2}, (4, 0)),
        (COMPLETIONS, {"prompt": [1, 2, 3], "truncate_prompt_tokens": 2}, (0, 0)),
        (COMPLETIONS, {"prompt": []}, (0, 0)),
        (COMPLETIONS, {"prompt": [1, "a"]}, (0, 0)),
        (COMPLETIONS, {}, (0, 0)),
        (RequestKind.GENERATE, {"token_ids": [1, 2]}, (0, 0)),
        (CHAT, {"messages": [user("  four  ")]}, (8, 4)),
        (
            CHAT,
            {"messages": [user("four"), {"role": "assistant", "content": "six666"}]},
            (10, 4),
        ),
        (CHAT, {"messages": [user([{"type": "text", "text": "four"}, IMAGE])]}, (4, 4)),
        (CHAT, {"messages": [user("four"), {"role": "assistant", "tool_calls": []}]}, (4, 4)),
        (CHAT, {"messages": [user("four")], "chat_template": "x"}, (4, 0)),
        (CHAT, {"messages": 5}, (0, 0)),
        (RESPONSES, {"input": "four", "instructions": "six666"}, (10, 10)),
        (RESPONSES, {"input": [user([{"type": "input_text", "text": "four"}])]}, (4, 4)),
        (RESPONSES, {"input": "four", "truncation": "auto"}, (4, 0)),
        (MESSAGES, {"system": [{"type": "text", "text": "six666"}], "messages": []}, (6, 6)),
        (MESSAGES, {"system": "six666", "messages": [user("four")]}, (10, 10)),
    ],
)
def test_the_text_of_each_kind(
    kind: RequestKind, body: dict[str, Any], expected: tuple[int, int]
) -> None:
    members = _members.decode(json.dumps(body))
    assert prompt_text(kind, members) == PromptText(*expected)


def test_a_text_of_more_than_the_longest_tokens_cannot_fit() -> None:
    assert over_length(640, 64, 10) is None
    problem = over_length(641, 64, 10)
    assert problem is not None
    assert problem.startswith("This model's maximum context length is 64 tokens. However, your")


LISTED = (
    b'{"data": [{"id": "m", "max_model_len": 64}, {"id": "a", "max_model_len": null}, {"id": "b"}]}'
)


@pytest.mark.parametrize(
    ("models", "model", "length"),
    [
        (LISTED, b'"m"', 64),
        (LISTED, b'"a"', None),
        (LISTED, b'"b"', None),
        (LISTED, b'"unknown"', None),
        (LISTED, b"7", None),
        (LISTED, None, None),
        (b'{"data": [{"id": "m", "max_model_len": "64"}]}', b'"m"', None),
        (b"{}", b'"m"', None),
        (b"", b'"m"', None),
    ],
)
def test_the_length_that_an_engine_lists(
    models: bytes, model: bytes | None, length: int | None
) -> None:
    assert listed_length(models, None if model is None else Raw(model)) == length
