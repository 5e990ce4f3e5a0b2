"""Reasons of failures: what of a server's message is shown."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_loadtest.calls import Answer, Message
from tandem_loadtest.client.answers import ServerMessage
from tandem_loadtest.client.reasons import LEFT_OUT, PIECE, Redactor, texts_of

HEADERS = {
    "Authorization": "Bearer sk-SECRET",
    "x-api-key": "EMPTY",
    "cookie": "session=abcdef0123; theme=dark",
    "content-type": "application/json",
    "x-retries": "3",
}
PROMPT = 'The patient "Jane Roe", born in Gießen,\nhas a \\ rare disease of the liver.'


def shown(text: str, *texts: str) -> str:
    return Redactor(HEADERS).shown(ServerMessage(text), texts)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("bad Authorization: Bearer sk-SECRET", "bad Authorization: [redacted]"),
        ("no user of sk-SECRET.", "no user of [redacted]."),
        ("key_sk-SECRET_", "key_[redacted]_"),
        ("sk-\x07SECRET", "[redacted]"),
        ("an EMPTY key, not EMPTYNESS", "an [redacted] key, not EMPTYNESS"),
        ("no session abcdef0123", "no session [redacted]"),
        ("missing Bearer, tried 3 times, not application/json",
         "missing Bearer, tried 3 times, not application/json"),
    ],
)  # fmt: skip
def test_credentials_are_replaced(text: str, line: str) -> None:
    assert Redactor(HEADERS).clean(text) == line
    assert shown(text) == line


def test_a_client_without_headers_has_no_credentials() -> None:
    assert Redactor({}).clean("as it is") == "as it is"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link", "link"),
        ("\x9b31mc1", "31mc1"),
        ("bell\x07 \u202eevil\u200b", "bell evil"),
        ("two\r\nlines\u2028more\t.", "two lines more ."),
    ],
)
def test_terminal_sequences_are_removed(text: str, line: str) -> None:
    assert shown(text) == line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("cmpl-0123456789abcdef failed", "cmpl-… failed"),
        ("request 123e4567-e89b-42d3-a456-426614174000.", "request …."),
        ("<object at 0x7f00aa55aa55>", "<object at …>"),
        ("model deadbeef of 4096 tokens", "model deadbeef of 4096 tokens"),
    ],
)
def test_ids_are_replaced(text: str, line: str) -> None:
    assert shown(text) == line


@pytest.mark.parametrize("word", ["'input':", '"input": '])
def test_what_a_validation_error_repeats_is_cut_off(word: str) -> None:
    assert shown(f"wrong field, {word}'hello'") == "wrong field,"


def test_a_long_message_is_cut() -> None:
    assert shown("x" * 300) == "x" * 200 + "…"


@pytest.mark.parametrize(
    "quotation",
    [
        PROMPT,
        json.dumps(PROMPT),
        json.dumps(json.dumps(PROMPT, ensure_ascii=False)),
        repr(PROMPT),
        " ".join(PROMPT.split()),
        PROMPT[:24],
        PROMPT[-24:],
        "born in Gie\\u00dfen,\\nhas",
    ],
)
def test_a_message_that_quotes_a_prompt_is_left_out(quotation: str) -> None:
    assert shown(f"bad prompt: {quotation}", "another text", PROMPT) == LEFT_OUT


def test_the_kind_of_a_message_that_is_left_out_is_kept() -> None:
    message = ServerMessage(PROMPT, "BadRequestError")
    assert Redactor({}).shown(message, [PROMPT]) == f"BadRequestError: {LEFT_OUT}"


@pytest.mark.parametrize(
    "text",
    [
        "The model `m` does not exist.",
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens.",
        "Token id 151936 is out of vocabulary",
    ],
)
def test_ordinary_messages_are_shown(text: str) -> None:
    ids = " ".join(map(str, range(151900, 152000)))
    assert shown(text, PROMPT, ids, "model m tokens", "does not") == text


@given(st.data())
def test_a_piece_of_a_text_is_noticed_wherever_it_is(data: st.DataObject) -> None:
    letters = st.text("abc", min_size=PIECE, max_size=60)
    text, before, after = data.draw(letters), *(data.draw(st.text("xyz")) for _ in range(2))
    start = data.draw(st.integers(0, len(text) - PIECE))
    assert shown(before + text[start : start + PIECE] + after, text) == LEFT_OUT
    assert shown(before + text[start : start + PIECE - 1] + after, text) != LEFT_OUT


@pytest.mark.parametrize(
    ("prompt", "noticed"), [("top secret", True), ("my secret", True), ("a secret", False)]
)
def test_a_short_prompt_is_noticed_as_a_whole(prompt: str, noticed: bool) -> None:
    assert (shown(f"not allowed: {prompt}!", prompt) == LEFT_OUT) is noticed


def test_the_texts_are_those_of_prompt_and_answer() -> None:
    answer = Answer("text", (3, 4), reasoning="thought", tool_calls="call")
    texts = {"text", "3 4", "thought", "call"}
    assert texts <= set(texts_of("prompt", answer))
    assert "prompt" in set(texts_of("prompt", answer))
    assert "1 2" in set(texts_of((1, 2), answer))
    assert {"u", "a"} <= set(texts_of((Message("user", "u"), Message("assistant", "a")), answer))
