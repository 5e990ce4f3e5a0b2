import pytest

from tandem_sidecar.resume.errors import StreamBroken
from tandem_sidecar.resume.ledger import Ledger
from tandem_sidecar.resume.seam import Seam

from .events import DONE, event, usage_event

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
    ledger, stream = Ledger(Seam(), keeps_ids=False), b"".join(sent for sent, _ in STREAM)
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert b"".join(map(ledger.take, pieces)) == b"".join(expected for _, expected in STREAM)
    assert (list(ledger.prompt_ids), list(ledger.ids)) == ([1, 2, 3], [7, 8, 9, 10, 11])
    assert ledger.is_finished
    assert ledger.is_done


def test_ids_that_the_client_asked_for_are_kept() -> None:
    ledger, stream = Ledger(Seam(), keeps_ids=True), b"".join(sent for sent, _ in STREAM)
    assert ledger.take(stream) == stream
    assert list(ledger.ids) == [7, 8, 9, 10, 11]


def test_lines_may_end_as_in_http() -> None:
    ledger, stream = Ledger(Seam(), keeps_ids=False), b"".join(sent for sent, _ in STREAM)
    coded = stream.replace(b"\n", b"\r\n")
    pieces = [coded[at : at + 1] for at in range(len(coded))]
    assert b"".join(map(ledger.take, pieces)) == b"".join(expected for _, expected in STREAM)


def test_an_engine_that_gives_no_ids_is_no_broken_one() -> None:
    ledger, stream = Ledger(Seam(), keeps_ids=False), b"".join(expected for _, expected in STREAM)
    assert ledger.take(stream) == stream
    assert ledger.is_done
    assert not ledger.prompt_ids


def test_an_event_without_text_waits_for_the_next() -> None:
    ledger = Ledger(Seam(), keeps_ids=False)
    ledger.take(event("a", [7], [1]))
    assert ledger.take(event("", [8])) == b""
    assert ledger.delivered == 1
    assert ledger.take(event("é", [9])) == event("", None) + event("é", None)
    assert ledger.delivered == 3


def test_what_was_not_delivered_is_forgotten() -> None:
    ledger = Ledger(Seam(), keeps_ids=False)
    ledger.take(event("a", [7], [1]) + event("", [8]) + event("cut off", [9])[:20])
    ledger.begin_again()
    assert list(ledger.ids) == [7]
    assert ledger.take(event("b", [10])) == event("b", None)


def test_what_comes_before_an_error_is_sent() -> None:
    ledger = Ledger(Seam(), keeps_ids=False)
    with pytest.raises(StreamBroken) as raised:
        ledger.take(event("a", [7], [1]) + event("b", [8]) + event("", [], finish="abort"))
    assert raised.value.before == event("a", None) + event("b", None)
    assert ledger.delivered == 2


def test_another_engine_begins_where_a_character_ends() -> None:
    ledger = Ledger(Seam(), keeps_ids=False)
    ledger.take(event("a", [7], [1]) + event("b", [8, 9]))
    ledger.begin_again()
    assert (ledger.seam.start, ledger.seam.text) == (1, "b")
    # Token 9 was the beginning of a character.
    assert ledger.take(event("b", [8])) == b""
    assert ledger.take(event("é", [9, 10])) == event("é", None)
    assert (list(ledger.ids), ledger.delivered) == ([7, 8, 9, 10], 4)


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
    ledger = Ledger(Seam(), keeps_ids=False)
    ledger.take(event("a", [7], [1]))
    with pytest.raises(StreamBroken, match=problem):
        ledger.take(broken)
