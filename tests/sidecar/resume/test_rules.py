import json
from typing import Any

import pytest

from tandem_contract.request_kinds import RequestKind
from tandem_sidecar.bodies.parse import parse_body
from tandem_sidecar.resume.rules import count_choices, obstacle, repeat_obstacle


def why_not(kind: RequestKind = RequestKind.COMPLETIONS, **body: Any) -> str | None:
    return obstacle(
        kind, parse_body(json.dumps({"prompt": "hi", "stream": True, **body}).encode()).members
    )


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": [1, 2, 3]},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_tokens": 9, "min_tokens": 2},
        {"stop": ["a", "bc"], "temperature": 0},
        {"stop": "\n", "logprobs": 3},
        {"n": 1, "seed": None, "stop": [], "echo": False, "presence_penalty": 0.0},
        {"stream_options": {"include_usage": True}, "repetition_penalty": 1.2},
    ],
)
def test_what_depends_on_the_ids_alone_is_continued(body: dict[str, Any]) -> None:
    assert why_not(**body) is None


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"seed": 3}, "seed"),
        ({"stop": "\n\n"}, "stop"),
        ({"stop": ["a", "bc"], "temperature": 0.1}, "stop"),
        ({"stop": 5}, "cannot be read"),
        ({"stop": "x" * 257, "temperature": 0}, "more than 256 characters"),
        ({"max_tokens": 100.0}, "max_tokens"),
        ({"max_tokens": "100"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"min_tokens": 1.0}, "min_tokens"),
        ({"n": 2}, "n"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"prompt": ["a", "b"]}, "several prompts"),
        ({"prompt": [[1], [2]]}, "several prompts"),
        ({"a_field_of_tomorrow": 1}, "a_field_of_tomorrow"),
        ({"stream": False}, "stream"),
    ],
)
def test_what_may_differ_is_not(body: dict[str, Any], named: str) -> None:
    assert named in (why_not(**body) or "")


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({}, ""),
        ({"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}}, ""),
        ({"max_completion_tokens": 5, "logprobs": True, "top_logprobs": 2}, ""),
        ({"tools": [{"type": "function"}]}, ""),
        ({"tools": [{"type": "function"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}], "logprobs": True}, "logprobs"),
        ({"tools": [{"type": "function"}], "stop": "z"}, "stop"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"reasoning_effort": "low", "include_reasoning": False}, "include_reasoning"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "media"),
        ({"echo": True}, "echo"),
        ({"prompt": "hi"}, "prompt"),
    ],
)
def test_which_chats_are(more: dict[str, Any], named: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, **more}
    why = obstacle(RequestKind.CHAT, parse_body(json.dumps(body).encode()).members)
    assert named in (why or "")
    assert bool(named) == bool(why)


@pytest.mark.parametrize(
    "kind",
    [kind for kind in RequestKind if kind not in {RequestKind.COMPLETIONS, RequestKind.CHAT}],
)
def test_other_apis_are_not_continued_yet(kind: RequestKind) -> None:
    assert str(kind) in (why_not(kind) or "")


@pytest.mark.parametrize(
    ("kind", "body", "named"),
    [
        (RequestKind.COMPLETIONS, {"seed": 3, "temperature": 1, "n": 2}, ""),
        (RequestKind.COMPLETIONS, {"temperature": 0, "a_field_of_tomorrow": 1}, ""),
        (RequestKind.COMPLETIONS, {"temperature": 0.1}, "without temperature 0 or a seed"),
        (RequestKind.COMPLETIONS, {"seed": None}, "without temperature 0 or a seed"),
        (RequestKind.COMPLETIONS, {"temperature": 0, "use_beam_search": True}, "use_beam_search"),
        (RequestKind.COMPLETIONS, {"temperature": 0, "n": "x"}, "cannot be read"),
        # An API without a seed ignores it.
        (RequestKind.MESSAGES, {"seed": 3}, "without temperature 0"),
        (RequestKind.RESPONSES, {"temperature": 0, "tools": [{"type": "function"}]}, ""),
        (RequestKind.RESPONSES, {"temperature": 0, "tools": [{"type": "mcp"}]}, "calls itself"),
        (RequestKind.RESPONSES, {"temperature": 0, "tools": [3]}, "cannot be read"),
        (RequestKind.RESPONSES, {"temperature": 0, "previous_response_id": "r"}, "previous"),
        (RequestKind.GENERATE, {"temperature": 0}, "generate"),
    ],
)
def test_which_answers_are_generated_again(
    kind: RequestKind, body: dict[str, Any], named: str
) -> None:
    why = repeat_obstacle(kind, parse_body(json.dumps(body).encode()).members)
    assert named in (why or "")
    assert bool(named) == bool(why)


@pytest.mark.parametrize(
    ("body", "count"),
    [({}, 1), ({"n": None}, 1), ({"n": 3, "prompt": ["a", "b"]}, 6), ({"prompt": [1, 2]}, 1)],
)
def test_choices_are_counted(body: dict[str, Any], count: int) -> None:
    members = parse_body(json.dumps(body).encode()).members
    assert count_choices(RequestKind.COMPLETIONS, members) == count
