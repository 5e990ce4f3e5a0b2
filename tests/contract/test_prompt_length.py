"""How much text a prompt has, and which cannot fit a model."""

import json
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from tandem_contract.prompt_length import (
    EXHAUSTING,
    LONGEST_TOKEN,
    PromptText,
    engine_length,
    length_problem,
    over_length,
    prompt_text,
)
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
    assert over_length(641, None, 10) is None
    problem = over_length(641, 64, 10)
    assert problem is not None
    assert problem.startswith("This model's maximum context length is 64 tokens. However, your")


LENGTH = 8192
LIMIT = LENGTH * LONGEST_TOKEN
TEXT = "x" * (LIMIT + 1)


@pytest.mark.parametrize(
    ("kind", "body", "length", "is_refused"),
    [
        (COMPLETIONS, {"prompt": TEXT}, LENGTH, True),
        (COMPLETIONS, {"prompt": TEXT[1:]}, LENGTH, False),
        (COMPLETIONS, {"prompt": TEXT}, None, False),
        (COMPLETIONS, {"prompt": TEXT, "truncate_prompt_tokens": 5}, LENGTH, False),
        (COMPLETIONS, {"prompt": "x" * (EXHAUSTING // 2)}, 1, False),
        (CHAT, {"messages": [user(TEXT)]}, LENGTH, True),
        (CHAT, {"messages": [{"role": "assistant", "content": TEXT}]}, LENGTH, False),
        (RESPONSES, {"input": [user(TEXT)]}, LENGTH, True),
        (MESSAGES, {"messages": [user(TEXT)]}, LENGTH, True),
        (CHAT, {"messages": [user("four")], "unread": TEXT}, LENGTH, False),
    ],
)
def test_a_body_whose_text_cannot_fit(
    kind: RequestKind, body: dict[str, Any], length: int | None, is_refused: bool
) -> None:
    data = json.dumps(body)
    problem = length_problem(kind, _members.decode(data), len(data), length)
    assert (problem is not None) is is_refused


@pytest.mark.parametrize(
    ("models", "length"),
    [
        (b'{"data": [{"id": "m", "max_model_len": 64}]}', 64),
        (b'{"data": [{"max_model_len": 64}, {"max_model_len": 128}]}', 128),
        (b'{"data": [{"max_model_len": 64}, {"max_model_len": null, "parent": "m"}]}', 64),
        (b'{"data": [{"max_model_len": 64}, {"id": "other"}]}', None),
        (b'{"data": [{"max_model_len": "64"}]}', None),
        (b'{"data": []}', None),
        (b"{}", None),
        (b"", None),
    ],
)
def test_the_length_that_an_engine_lists(models: bytes, length: int | None) -> None:
    assert engine_length(models) == length
