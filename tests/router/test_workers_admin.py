"""What the admin port makes of the workers' answers, also of those that fail."""

import json

import pytest

from tandem_router.workers_admin import merge_decisions

EARLIER, LATER = b'[{"decided": 1, "request_id": "a"}]', b'[{"decided": 2, "request_id": "b"}]'


def test_decisions_of_all_workers_are_sorted_by_time() -> None:
    status, body = merge_decisions([(200, LATER), (200, EARLIER)], by_id=False)
    assert (status, [trace["request_id"] for trace in json.loads(body)]) == (200, ["a", "b"])


@pytest.mark.parametrize(
    ("other", "text"),
    [(500, b"500 Internal Server Error"), (503, b"draining\n"), (404, b"404: Not Found")],
)
def test_a_worker_that_fails_is_left_out(other: int, text: bytes) -> None:
    status, body = merge_decisions([(other, text), (200, EARLIER)], by_id=True)
    assert (status, len(json.loads(body))) == (200, 1)


def test_an_id_that_no_worker_knows_is_a_404_with_an_empty_list() -> None:
    status, body = merge_decisions([(404, b"[]"), (404, b"[]")], by_id=True)
    assert (status, json.loads(body)) == (404, [])


def test_a_wrong_question_gets_the_workers_answer() -> None:
    assert merge_decisions([(200, EARLIER), (400, b"limit\n")], by_id=False) == (400, b"limit\n")


@pytest.mark.parametrize("answers", [[], [(500, b"oops")]])
def test_without_a_usable_answer_it_is_a_503(answers: list[tuple[int, bytes]]) -> None:
    assert merge_decisions(answers, by_id=False) == (503, b"no worker answers\n")
