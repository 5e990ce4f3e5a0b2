"""Messages as vLLM gives them to a chat template."""

from typing import Any

import pytest

from tandem_contract.chat_messages import template_message

ASSISTANT = {"role": "assistant", "content": ""}


def call(arguments: object) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "sum", "arguments": arguments}}


@pytest.mark.parametrize(
    ("message", "texts", "expected"),
    [
        ({"role": "user", "content": "a", "cache": 1}, ["a"], {"role": "user", "content": "a"}),
        ({"role": "user"}, ["a", "", "b"], {"role": "user", "content": "a\nb"}),
        ({"role": "user", "name": "Ada"}, ["a"], {"role": "user", "content": "a", "name": "Ada"}),
        ({"role": "assistant", "content": None}, [], ASSISTANT),
        (
            {"role": "assistant", "tool_calls": [call('{"a": [1, 2]}')]},
            [],
            {**ASSISTANT, "tool_calls": [call({"a": [1, 2]})]},
        ),
        ({"role": "assistant", "tool_calls": []}, [], ASSISTANT),
        (
            {
                "role": "assistant",
                "tool_calls": [call(x) for x in ("", None, "{", "[1]", {"b": 1})],
            },
            [],
            {**ASSISTANT, "tool_calls": [call(x) for x in ({}, {}, {}, {}, {"b": 1})]},
        ),
        (
            {"role": "assistant", "reasoning": "why"},
            ["a"],
            {"role": "assistant", "content": "a", "reasoning": "why", "reasoning_content": "why"},
        ),
        (
            {"role": "tool", "tool_call_id": "c1"},
            ["3", "4"],
            {"role": "tool", "content": "3\n4", "tool_call_id": "c1"},
        ),
        ({"role": "developer"}, ["a"], {"role": "developer", "content": "a", "tools": None}),
    ],
)
def test_the_template_gets_what_vllm_gives_it(
    message: dict[str, Any], texts: list[str], expected: dict[str, Any]
) -> None:
    assert template_message(message, texts, has_part_lists=False) == expected


def test_templates_that_list_parts_get_them_but_for_tool_results() -> None:
    parts = [{"type": "text", "text": text} for text in ("a", "")]
    user = template_message({"role": "user"}, ["a", ""], has_part_lists=True)
    assert user == {"role": "user", "content": parts}
    tool = template_message({"role": "tool"}, ["a", "b"], has_part_lists=True)
    assert tool == {"role": "tool", "content": "a\nb"}


@pytest.mark.parametrize("calls", [{"id": 1}, ["text"], [{"function": "sum"}]])
def test_tool_calls_without_a_function_are_refused(calls: object) -> None:
    with pytest.raises(ValueError, match="tool_calls"):
        template_message({"role": "assistant", "tool_calls": calls}, [], has_part_lists=False)
