"""A response as it arrives: the times of its tokens, and its limits."""

import pytest

from tandem_loadtest.calls import Answer, Call
from tandem_loadtest.client import exchange as module
from tandem_loadtest.client.answers import AnswerError
from tandem_loadtest.client.exchange import Exchange
from tandem_loadtest.client.reasons import Redactor

from ..servers import chunk, sse

ROLE = sse({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
ERROR = sse({"error": {"message": "died"}})


def streamed(**fields: str) -> Exchange:
    exchange = Exchange(Call("x", 4), started=0.0, redactor=Redactor({}))
    exchange.head(200, {name.encode(): value.encode() for name, value in fields.items()})
    return exchange


def test_times_are_those_of_reads_with_tokens() -> None:
    exchange = streamed()
    reads = {
        1.0: ROLE,
        2.0: chunk("a", 1) + chunk("b", 2),
        3.0: b": keep-alive\n\n" + chunk("c", 3)[:9],
        5.0: chunk("c", 3)[9:],
        6.0: chunk("d", 4),
        7.0: sse({"choices": [], "usage": {"prompt_tokens": 1}}),
    }
    for now, data in reads.items():
        exchange.data(data, now)
    assert (exchange.first_token, exchange.last_token) == (2.0, 6.0)
    assert exchange.gaps == [3.0, 1.0]


def test_tokens_before_an_error_in_the_same_read_count() -> None:
    exchange = streamed()
    with pytest.raises(AnswerError, match="died"):
        exchange.data(chunk("a", 1) + ERROR, 2.0)
    assert exchange.first_token == 2.0
    assert exchange.answer().text == "a"


def test_an_answer_without_tokens_has_no_times() -> None:
    exchange = streamed()
    exchange.data(ROLE, 1.0)
    assert (exchange.first_token, exchange.last_token, exchange.gaps) == (None, None, [])


@pytest.mark.parametrize(
    "media_type", ["text/event-stream", "text/event-stream; charset=utf-8", "Text/Event-Stream"]
)
def test_an_event_stream_is_recognized(media_type: str) -> None:
    exchange = streamed(**{"content-type": media_type})
    exchange.data(chunk("a", 1), 1.0)
    assert exchange.answer() == Answer("a", (1,))


def test_a_large_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BODY", 100)
    exchange = Exchange(Call("x", 4, stream=False), started=0.0, redactor=Redactor({}))
    exchange.head(200, {})
    exchange.data(b" " * 100, 1.0)
    with pytest.raises(AnswerError, match="exceeds"):
        exchange.data(b" ", 1.0)
