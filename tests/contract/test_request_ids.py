"""Which request ids of a client are used."""

import pytest

from tandem_contract.request_ids import MAX_LENGTH, usable_request_id


@pytest.mark.parametrize("value", ["a", "9f3c-77", "tenant/42:retry=1", "x" * MAX_LENGTH])
def test_printable_ascii_is_used_as_it_is(value: str) -> None:
    assert usable_request_id(value) == value


def test_a_caller_may_allow_longer_ids() -> None:
    longer = "x" * (MAX_LENGTH + 1)
    assert usable_request_id(longer, max_length=2 * MAX_LENGTH) == longer


@pytest.mark.parametrize(
    "value", [None, "", " ", "two words", "tab\t", "line\nbreak", "é", "x" * (MAX_LENGTH + 1)]
)
def test_any_other_id_is_unusable(value: str | None) -> None:
    assert usable_request_id(value) is None
