import pytest

from tandem_contract.request_kinds import RequestKind
from tandem_sidecar.resume.errors import StreamBroken
from tandem_sidecar.resume.whole_tokens import MAX_MODELS, MAX_NAME, Vocabularies

from .events import DONE, chat_event, event, ledger, role_event, usage_event

STREAM = [
    (event("Hel", [7], [1, 2, 3]), event("Hel", None)),
    (event("lo", [8, 9]), event("lo", None)),
    (event('"token_ids":[5]', [10]), event('"token_ids":[5]', None)),
    (event("", [11], finish="stop"), event("", None, finish="stop")),
    (usage_event(3, 5, id="cmpl-first"), usage_event(3, 5, id="cmpl-first")),
    (DONE, DONE),
]
"""Events with ids, and the same of an engine that was not asked for them."""


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_the_client_gets_the_stream_as_if_nobody_had_asked_for_ids(size: int) -> None:
    record, stream = ledger(), b"".join(sent for sent, _ in STREAM)
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert b"".join(map(record.take, pieces)) == b"".join(expected for _, expected in STREAM)
    assert (list(record.prompt_ids), list(record.ids)) == ([1, 2, 3], [7, 8, 9, 10, 11])
    assert record.is_finished
    assert record.is_done


def test_ids_that_the_client_asked_for_are_kept() -> None:
    record, stream = ledger(keeps_ids=True), b"".join(sent for sent, _ in STREAM)
    assert record.take(stream) == stream
    assert list(record.ids) == [7, 8, 9, 10, 11]


def test_lines_may_end_as_in_http() -> None:
    record, stream = ledger(), b"".join(sent for sent, _ in STREAM)
    coded = stream.replace(b"\n", b"\r\n")
    pieces = [coded[at : at + 1] for at in range(len(coded))]
    assert b"".join(map(record.take, pieces)) == b"".join(expected for _, expected in STREAM)


def test_an_engine_that_gives_no_ids_is_no_broken_one() -> None:
    record, stream = ledger(), b"".join(expected for _, expected in STREAM)
    assert record.take(stream) == stream
    assert record.is_done
    assert not record.prompt_ids


def test_an_event_without_text_waits_for_the_next() -> None:
    record = ledger()
    record.take(event("a", [7], [1]))
    assert record.take(event("", [8])) == b""
    assert record.delivered == 1
    assert record.take(event("é", [9])) == event("", None) + event("é", None)
    assert record.delivered == 3


def test_what_was_not_delivered_is_forgotten() -> None:
    record = ledger()
    record.take(event("a", [7], [1]) + event("", [8]) + event("cut off", [9])[:20])
    record.begin_again()
    assert list(record.ids) == [7]
    assert record.take(event("b", [10])) == event("b", None)


@pytest.mark.parametrize("is_parsed", [False, True])
def test_tokens_that_were_held_back_are_no_group_of_the_next_engine(is_parsed: bool) -> None:
    record = ledger(RequestKind.CHAT)
    record.take(role_event([1]) + chat_event("a", [5]) + chat_event({}, [6, 7]))
    if is_parsed:
        record.begin_parsed()
    else:
        record.begin_again()
    record.take(chat_event("b", [6]) + chat_event("c", [7, 8]))
    record.begin_parsed()
    assert (list(record.ids), record.groups()) == ([5, 6, 7, 8], [1, 1, 2])


def test_what_comes_before_an_error_is_sent() -> None:
    record = ledger()
    with pytest.raises(StreamBroken) as raised:
        record.take(event("a", [7], [1]) + event("b", [8]) + event("", [], finish="abort"))
    assert raised.value.before == event("a", None) + event("b", None)
    assert record.delivered == 2


def test_another_engine_begins_where_a_character_ends() -> None:
    record = ledger()
    record.take(event("a", [7], [1]) + event("b", [8, 9]))
    record.begin_again()
    assert (record.seam.start, record.seam.text) == (1, "b")
    # Token 9 was the beginning of a character.
    assert record.take(event("b", [8])) == b""
    assert record.take(event("é", [9, 10])) == event("é", None)
    assert (list(record.ids), record.delivered) == ([7, 8, 9, 10], 4)


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (b'data: {"error":{"message":"the core died"}}\n\n', "reported an error"),
        (event("", [], finish="abort"), "ended the request"),
        (event("", [], finish="error"), "ended the request"),
        (DONE, "without a finish reason"),
    ],
    ids=["error", "abort", "finish-error", "no-finish"],
)
def test_an_end_that_is_none_is_not_sent(broken: bytes, problem: str) -> None:
    record = ledger()
    record.take(event("a", [7], [1]))
    with pytest.raises(StreamBroken, match=problem):
        record.take(broken)


CHAT = [
    (role_event([1, 2, 3]), role_event(None)),
    (chat_event("Hel", [7]), chat_event("Hel", None)),
    (chat_event("", [8]), chat_event("", None)),
    (chat_event('","', [9]), chat_event('","', None)),
    (chat_event('"},"a', [10]), chat_event('"},"a', None)),
    (chat_event("", [11], finish="stop"), chat_event("", None, finish="stop")),
    (usage_event(3, 5, id="cmpl-first"), usage_event(3, 5, id="cmpl-first")),
    (DONE, DONE),
]


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_a_chat_has_the_prompts_ids_in_its_first_event(size: int) -> None:
    record, stream = ledger(RequestKind.CHAT), b"".join(sent for sent, _ in CHAT)
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert b"".join(map(record.take, pieces)) == b"".join(expected for _, expected in CHAT)
    assert (list(record.prompt_ids), list(record.ids)) == ([1, 2, 3], [7, 8, 9, 10, 11])
    assert (record.delivered, record.obstacle) == (5, "")


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning": "hm"},
        {"content": "x", "reasoning": None},
        {"content": "x", "tool_calls": []},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"delta":{"content":"'}}]},
    ],
)
def test_a_chat_that_its_engine_parses_is_not_continued(delta: dict[str, object]) -> None:
    record = ledger(RequestKind.CHAT)
    record.take(role_event([1]) + chat_event("a", [2]))
    got = record.take(chat_event(delta, [3]))
    assert got == chat_event(delta, None)
    assert "tool calls" in record.obstacle


@pytest.mark.parametrize("keeps_ids", [False, True])
def test_a_parser_without_text_for_a_token_waits_for_the_next(keeps_ids: bool) -> None:
    record = ledger(RequestKind.CHAT, keeps_ids=keeps_ids)
    record.take(role_event([1]) + chat_event("a", [2]))
    assert record.take(chat_event({}, [3])) == b""
    assert (record.delivered, record.obstacle) == (1, "")
    got = record.take(chat_event("é", [4]))
    if keeps_ids:
        assert got == chat_event({}, [3]) + chat_event("é", [4])
    else:
        # The first was sent only because the ids were asked for.
        assert got == chat_event("é", None)
    assert record.delivered == 3
    last = record.take(chat_event({}, [5], finish="stop"))
    assert last == chat_event({}, [5] if keeps_ids else None, finish="stop")
    assert (record.is_finished, record.obstacle) == (True, "")


def test_a_chat_without_ids_is_not_continued() -> None:
    record = ledger(RequestKind.CHAT)
    assert record.take(chat_event("a", None)) == chat_event("a", None)
    assert "no token ids" in record.obstacle


def test_a_token_that_is_known_to_be_whole_ends_a_character() -> None:
    record = ledger()
    record.take(event("a", [7], [1]) + event("bc", [8, 9]))
    assert record.seam.start == 1
    # Alone, right after a character: whole from now on.
    record.take(event("d", [10]) + event("e", [9]) + event("bc", [8, 9]))
    assert (record.delivered, record.seam.start) == (7, 7)
    # It came alone, but as the end of a character that another token began.
    record.take(event("", [11]) + event("é", [12]) + event("bé", [8, 11, 12]))
    assert (record.delivered, record.seam.start) == (12, 9)


@pytest.mark.parametrize(
    "odd",
    [
        event("b", [-1]),
        event("b", [8], []),
        event("b", [1 << 40]),
        b'data: {"choices":[{"text":"b","token_ids":[x]}]}\n\n',
    ],
    ids=["negative", "no prompt", "too large", "no number"],
)
def test_an_event_that_is_none_of_the_apis_breaks_the_stream(odd: bytes) -> None:
    record = ledger()
    with pytest.raises(StreamBroken, match="cannot be read") as caught:
        record.take(role_event(None) + event("a", [7]) + odd)
    assert caught.value.before == role_event(None) + event("a", None)


def test_a_comment_is_no_event_of_the_stream() -> None:
    record, comment = ledger(), b": ping\n\n"
    sent = record.take(event("a", [7], [1]) + comment + event("b", [8]))
    assert sent == event("a", None) + comment + event("b", None)
    assert not record.obstacle
    assert list(record.ids) == [7, 8]


def test_made_up_names_of_models_take_no_room() -> None:
    known = Vocabularies()
    known.of(b"real").add(5)
    for number in range(3 * MAX_MODELS):
        known.of(b"%d" % number * MAX_NAME).add(6)
        known.of(b"%d" % number)
        assert 5 in known.of(b"real")
