"""The load client reads events as the table of the APIs does."""

import json

import pytest

from tandem_contract.api_grammar import Meaning
from tandem_contract.request_kinds import RequestKind
from tandem_loadtest.client.answers import AnswerError
from tandem_loadtest.client.exchange import STREAMS
from tandem_loadtest.client.outcome import Facts, Promises, classify
from tandem_loadtest.client.sse import StreamEvent
from tandem_loadtest.records import Outcome

from ...contract.test_api_grammar import CASES

UNREAD = [
    # Only the first choice is measured.
    {"choices": [{"index": 1, "text": ""}, {"index": 0, "text": "a"}]},
    # The table counts what it does not know as a token, so that nothing waits for one.
    {"type": "response.of_a_later_version"},
]
READ = [case for case in CASES if case[1] not in UNREAD]


@pytest.mark.parametrize(("kind", "event", "meaning"), READ)
def test_tokens_and_errors_are_those_of_the_table(
    kind: RequestKind, event: dict[str, object], meaning: Meaning
) -> None:
    stream, reason = STREAMS[kind](), None
    try:
        stream.add(StreamEvent(json.dumps(event).encode()))
    except AnswerError as err:
        reason = str(err)
    assert stream.token_events == (meaning is Meaning.TOKEN)
    finish = stream.so_far().finish_reason
    outcome, _ = classify(Facts(200, answer_error=reason, finish_reason=finish), Promises())
    assert (outcome is Outcome.IN_BAND_ERROR) == (meaning is Meaning.ERROR)


@pytest.mark.parametrize("kind", RequestKind)
def test_an_event_named_error_is_one(kind: RequestKind) -> None:
    event = StreamEvent(b'{"message": "lost"}', b"error")
    with pytest.raises(AnswerError, match="lost"):
        STREAMS[kind]().add(event)
