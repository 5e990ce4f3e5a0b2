import json
from typing import Any

import pytest

from tandem_contract.request_kinds import RequestKind
from tandem_sidecar.bodies.parse import parse_body
from tandem_sidecar.resume.continuation import Splice, continued, with_ids
from tandem_sidecar.resume.ledger import Ledger

from .events import DONE, event, ledger, usage_event


def delivered(*ids: int) -> Ledger:
    """A stream of the prompt 1, 2, 3 that delivered these tokens."""
    record = ledger()
    record.take(event("a", ids[:1], [1, 2, 3]))
    for token in ids[1:]:
        record.take(event("b", [token]))
    return record


def continuation(kind: RequestKind = RequestKind.COMPLETIONS, **body: Any) -> dict[str, Any] | None:
    asked = with_ids(parse_body(json.dumps({"prompt": "hi", "stream": True, **body}).encode()))
    made = continued(kind, asked, delivered(7, 8))
    if made is None:
        return None
    members: dict[str, Any] = json.loads(made.data)
    return members


def test_prompt_and_delivered_tokens_are_the_new_prompt() -> None:
    made = continuation(max_tokens=10, min_tokens=5, temperature=0, user="unit")
    assert made == {
        "prompt": [1, 2, 3, 7, 8],
        "stream": True,
        "max_tokens": 8,
        "min_tokens": 3,
        "temperature": 0,
        "user": "unit",
        "return_token_ids": True,
    }


@pytest.mark.parametrize(
    ("body", "most"),
    [({}, 14), ({"max_tokens": None}, None), ({"max_tokens": 3}, 1)],
    ids=["default", "engine's", "last"],
)
def test_only_the_rest_is_asked_for(body: dict[str, Any], most: int | None) -> None:
    made = continuation(**body)
    assert made is not None
    assert made.get("max_tokens") == most


@pytest.mark.parametrize(
    ("body", "limits"),
    [
        ({}, {}),
        ({"max_tokens": 9}, {"max_tokens": 7}),
        ({"max_completion_tokens": 9, "max_tokens": 5}, {"max_completion_tokens": 7}),
    ],
    ids=["engine's", "old name", "new name"],
)
def test_a_chat_keeps_its_messages_beside_the_ids(
    body: dict[str, Any], limits: dict[str, Any]
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    made = continuation(RequestKind.CHAT, messages=messages, **body)
    assert made is not None
    assert made["messages"] == messages
    assert made["kv_transfer_params"] == {"prompt_token_ids": [1, 2, 3, 7, 8]}
    assert {name: made[name] for name in limits} == limits


def test_nothing_is_asked_for_when_all_was_delivered() -> None:
    assert continuation(max_tokens=2) is None


def test_fields_that_shaped_the_prompt_are_not_applied_twice() -> None:
    made = continuation(truncate_prompt_tokens=2, add_special_tokens=True)
    assert made is not None
    assert made.keys().isdisjoint({"truncate_prompt_tokens", "add_special_tokens"})


@pytest.mark.parametrize("asked", [True, False, None])
def test_the_first_engine_is_asked_for_ids_once(asked: bool | None) -> None:
    body = parse_body(json.dumps({"prompt": "hi", "return_token_ids": asked}).encode())
    assert json.loads(with_ids(body).data) == {"prompt": "hi", "return_token_ids": True}


def test_the_continuation_reads_as_the_first_stream() -> None:
    record = delivered(7, 8)
    record.editor = Splice(record)
    prompt = [1, 2, 3, 7, 8]
    got = record.take(
        event("c", [9], prompt, id="cmpl-second", created=9)
        + event("d", [10], finish="length", id="cmpl-second", created=9)
        + usage_event(5, 2, cached=5, id="cmpl-second")
        + DONE
    )
    events = [json.loads(line[len("data: ") :]) for line in got.decode().split("\n\n")[:3]]
    assert [(each["id"], each["created"]) for each in events] == [("cmpl-first", 5)] * 3
    assert [each["choices"][0]["text"] for each in events[:2]] == ["c", "d"]
    assert b'token_ids":[' not in got
    assert events[2]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert list(record.ids) == [7, 8, 9, 10]
