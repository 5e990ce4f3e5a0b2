"""The queue of prefills on one pod: drained by first tokens and by the clock."""

from hypothesis import given
from hypothesis import strategies as st

from tandem_epp.estimates.prefill_queue import PrefillQueue


def test_the_head_ends_after_its_seconds_and_the_others_wait() -> None:
    queue = PrefillQueue()
    first = queue.add(2.0, 10.0)
    queue.add(3.0, 10.5)
    assert (queue.head_ends, queue.seconds_behind_head, len(queue)) == (12.0, 3.0, 2)
    queue.remove(first, 11.0)
    assert (queue.head_ends, queue.seconds_behind_head, len(queue)) == (14.0, 0.0, 1)


def test_an_entry_behind_the_head_may_end_first() -> None:
    queue = PrefillQueue()
    queue.add(2.0, 10.0)
    second = queue.add(3.0, 10.0)
    queue.remove(second, 10.1)
    queue.remove(second, 10.2)
    assert (queue.head_ends, queue.seconds_behind_head, len(queue)) == (12.0, 0.0, 1)


def test_a_prefill_without_a_visible_first_token_ends_by_the_clock() -> None:
    queue = PrefillQueue()
    queue.add(2.0, 10.0, has_first_token=False)
    seen = queue.add(3.0, 10.0)
    assert not queue.drain(11.9)
    assert queue.drain(12.5)
    assert (queue.head, queue.head_ends) == (seen, 15.0)
    assert not queue.drain(99.0), "this one ends with its first token"


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=20))
def test_an_empty_queue_has_nothing_left(seconds: list[float]) -> None:
    queue = PrefillQueue()
    entries = [queue.add(s, 0.0) for s in seconds]
    for i, entry in enumerate(sorted(entries, key=id)):
        assert len(queue) == len(entries) - i
        queue.remove(entry, float(i))
    assert (queue.head, queue.seconds_behind_head, len(queue)) == (None, 0.0, 0)
    queue.add(1.0, 5.0)
    assert (queue.head_ends, queue.seconds_behind_head) == (6.0, 0.0)
