"""Recorded conversations: both formats, JSON arrays and lines, limits, and clear errors."""

import json
from pathlib import Path

import pytest

from tandem_loadtest.workload.sessions import Turn
from tandem_loadtest.workload.sharegpt import (
    Conversation,
    ConversationsError,
    Limits,
    estimate_tokens,
    load_conversations,
    to_turns,
)


def said(*messages: tuple[str, str]) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": role, "value": text} for role, text in messages]}


def messages(*messages: tuple[str, str]) -> dict[str, object]:
    return {"messages": [{"role": role, "content": text} for role, text in messages]}


FIRST = said(("human", "one"), ("gpt", "answer one"), ("user", "two"), ("assistant", "answer two"))
SECOND = messages(("system", "be brief"), ("user", "three"), ("assistant", "answer three"))
EXPECTED = [
    Conversation("", (("one", "answer one"), ("two", "answer two"))),
    Conversation("be brief", (("three", "answer three"),)),
]


def written(folder: Path, content: str | bytes) -> Path:
    file = folder / "conversations"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def lines(*entries: object) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


@pytest.mark.parametrize(
    "content",
    [
        json.dumps([FIRST, SECOND], indent=1),
        lines(FIRST, SECOND),
        "\n" + lines(FIRST) + "\r\n\n" + lines(SECOND),
        "\ufeff" + lines(FIRST, SECOND),
    ],
)
def test_arrays_and_lines_of_both_formats_are_read(tmp_path: Path, content: str) -> None:
    file = written(tmp_path, content)
    assert load_conversations(file) == EXPECTED
    assert load_conversations(file, limit=1) == EXPECTED[:1]


def test_the_limit_leaves_later_entries_undecoded(tmp_path: Path) -> None:
    assert load_conversations(written(tmp_path, json.dumps([FIRST, 7])), limit=1) == EXPECTED[:1]
    assert load_conversations(written(tmp_path, lines(FIRST) + "x"), limit=1) == EXPECTED[:1]


def test_only_what_the_user_says_and_the_model_answers_counts(tmp_path: Path) -> None:
    entry = said(
        ("gpt", "left out: no question"), ("human", "a"), ("human", "b"), ("bing", "c"),
        ("gpt", "left out: no question"), ("human", " "), ("gpt", "left out: empty question"),
        ("human", "left out: no answer"),
    )  # fmt: skip
    unanswered = said(("human", "no answer"))
    file = written(tmp_path, lines(unanswered, entry, said()))
    assert load_conversations(file) == [Conversation("", (("a\n\nb", "c"),))]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({}, "expected a field `conversations` or `messages`"),
        ([], "Expected `object`, got `array`"),
        ({"conversations": 5}, r"Expected `array \| null`, got `int` - at `\$.conversations`"),
        ({"messages": [{"role": "user"}]}, "Object missing required field `content`"),
        ({"messages": [{"role": "user", "content": None}]}, "Expected `str`, got `null`"),
        (said(("tool", "secret")), "unknown role 'tool': expected system, human, user"),
    ],
)
def test_an_error_names_line_or_entry_without_text(
    tmp_path: Path, entry: object, message: str
) -> None:
    for content, place in (
        (lines(FIRST) + "\n" + lines(entry), ":3: "),
        (json.dumps([FIRST, FIRST, entry]), ": entry 3: "),
    ):
        file = written(tmp_path, content)
        with pytest.raises(ConversationsError, match=f"^{file}{place}{message}") as caught:
            load_conversations(file)
        assert "\n" not in str(caught.value)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lines(FIRST) + "{", ":2: not JSON in UTF-8"),
        (lines(FIRST).encode() + b'{"messages": [{"role": "\xff"}]}', ":2: not JSON in UTF-8"),
        ("[{}", ": not a JSON array"),
        (b'[{"messages": [{"role": "\xff"}]}]', ": entry 1: not JSON in UTF-8"),
        ("", ": has no conversation with an answer"),
        ("[]", ": has no conversation with an answer"),
        (lines(said(("human", "a"))), ": has no conversation with an answer"),
    ],
)
def test_a_file_without_conversations_is_an_error(
    tmp_path: Path, content: str | bytes, message: str
) -> None:
    file = written(tmp_path, content)
    with pytest.raises(ConversationsError, match=f"^{file}(?:{message})"):
        load_conversations(file)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConversationsError, match="cannot read it: No such file"):
        load_conversations(tmp_path / "none")


LONG = Conversation("sys", (("aaaa", "bbbbbb"), ("cc", "d" * 9), ("e", "f")))


def test_answers_give_the_lengths_of_the_turns() -> None:
    assert to_turns(LONG, Limits(), len) == (Turn("aaaa", 6), Turn("cc", 9), Turn("e", 1))


@pytest.mark.parametrize(
    ("limits", "outputs"),
    [
        (Limits(output_tokens=7), [6, 7, 1]),
        (Limits(turns=2), [6, 9]),
        # Prompts of 3 + 4, then 6 + 2, then 9 + 1 characters more.
        (Limits(prompt_tokens=6), []),
        (Limits(prompt_tokens=7), [6]),
        (Limits(prompt_tokens=15), [6, 9]),
        (Limits(prompt_tokens=24), [6, 9]),
        (Limits(prompt_tokens=25), [6, 9, 1]),
        # A shorter answer leaves more room for the next prompt.
        (Limits(prompt_tokens=20, output_tokens=5), [5, 5, 1]),
    ],
)
def test_limits_cut_conversations_and_answers(limits: Limits, outputs: list[int]) -> None:
    assert [turn.output_tokens for turn in to_turns(LONG, limits, len)] == outputs


def test_tokens_are_estimated_by_characters() -> None:
    assert [estimate_tokens("x" * n) for n in (0, 1, 4, 400)] == [1, 1, 1, 100]
