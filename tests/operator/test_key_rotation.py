"""Key rotation: a key is in the Secret before it signs, and until its last plan has expired."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract.plan import key_id, signing_key, signs_from
from tandem_operator.planning.key_rotation import AHEAD, keys_in, rotate, secret_data

DAY = 24 * 3600.0
START = 1_800_000_000.0
SECRET = bytes(range(32))


def test_the_first_key_signs_at_once() -> None:
    first = rotate({}, START, SECRET, DAY)
    assert first.keys == {key_id(START): SECRET.hex().encode()}
    assert signing_key(first.keys, START) == key_id(START)
    assert first.next == START + DAY - AHEAD


def test_nothing_changes_before_a_key_is_due() -> None:
    first = rotate({}, START, SECRET, DAY)
    assert rotate(first.keys, first.next - 1, b"", DAY) == first


def test_the_next_key_is_added_ahead_and_does_not_sign_yet() -> None:
    first = rotate({}, START, SECRET, DAY)
    second = rotate(first.keys, first.next, SECRET, DAY)
    assert set(second.keys) == {key_id(START), key_id(START + DAY)}
    assert signing_key(second.keys, first.next) == key_id(START)
    assert second.next == START + DAY


def test_a_key_is_dropped_when_the_second_one_after_it_signs() -> None:
    names = [key_id(START + i * DAY) for i in range(3)]
    keys = dict.fromkeys(names, b"k" * 32)
    assert set(rotate(keys, START + 2 * DAY - 1, b"", DAY).keys) == set(names)
    assert set(rotate(keys, START + 2 * DAY, b"", DAY).keys) == set(names[1:])


def test_after_a_long_outage_the_new_key_is_still_added_ahead() -> None:
    late = START + 30 * DAY
    rotated = rotate({key_id(START): b"k" * 32}, late, SECRET, DAY)
    assert set(rotated.keys) == {key_id(START), key_id(late + AHEAD)}


def test_a_key_from_a_wrong_clock_is_dropped_and_a_manual_key_stays() -> None:
    keys = {"mine": b"m" * 32, key_id(START): b"k" * 32, key_id(START + 400 * DAY): b"w" * 32}
    assert set(rotate(keys, START + 1, b"", DAY).keys) == {"mine", key_id(START)}


def test_a_key_that_is_due_needs_a_secret() -> None:
    with pytest.raises(ValueError, match="32 random bytes"):
        rotate({}, START, b"short", DAY)


@given(
    steps=st.lists(st.floats(min_value=1.0, max_value=3 * DAY), max_size=30),
    period=st.floats(min_value=3600.0, max_value=7 * DAY),
)
def test_a_verifier_that_is_ahead_seconds_late_verifies_every_plan(
    steps: list[float], period: float
) -> None:
    """Rotates at arbitrary times; a verifier AHEAD seconds late has the key that signs."""
    now, keys = START, dict(rotate({}, START, SECRET, period).keys)
    history = [(now, keys)]
    for step in steps:
        now += step
        before = keys
        keys = dict(rotate(keys, now, SECRET, period).keys)
        history.append((now, keys))
        signer = signing_key(keys, now)
        assert signer == signing_key(before, now), "a key signed as soon as it was added"
        readable = [key_set for at, key_set in history if at <= now - AHEAD or at == START]
        assert signer in readable[-1]
        assert len(keys) <= 3


def test_rotations_at_their_due_times_never_stop() -> None:
    rotation = rotate({}, START, SECRET, DAY)
    for _ in range(20):
        later = rotate(rotation.keys, rotation.next, SECRET, DAY)
        assert later.next > rotation.next
        rotation = later
    assert all(signs_from(name) is not None for name in rotation.keys)


def test_keys_that_no_epp_could_load_are_left_out() -> None:
    keys = {"b": b"k" * 32, "a": b"j" * 16}
    data = secret_data(keys)
    assert list(data) == ["a", "b"]
    bad = {"short": data["a"][:20], "no base64": "%%", "a.dot": data["a"], "none": None}
    assert keys_in({"data": {**data, **bad}}) == keys
    assert keys_in(None) == keys_in({}) == {}
