"""How many prompts overlapped, counted without looking at each pair of them."""

from hypothesis import given
from hypothesis import strategies as st

from tandem_contract.overlaps import Overlaps


def test_prompts_before_and_after_the_beginning_count() -> None:
    overlaps = Overlaps()
    first, second = overlaps.begin("e"), overlaps.begin("e")
    other_engine = overlaps.begin("f")
    assert (first.others, second.others, other_engine.others) == (1, 1, 0)
    first.end()
    first.end()
    third = overlaps.begin("e")
    assert (first.others, second.others, third.others) == (1, 2, 1)
    for overlap in (second, third, other_engine):
        overlap.end()
    assert len(overlaps) == 0
    assert overlaps.begin("e").others == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_the_count_is_that_of_all_pairs(steps: list[tuple[bool, int]]) -> None:
    """Against the plain definition: two prompts overlap if both were open at the same time."""
    overlaps = Overlaps()
    is_open = {}
    met: dict[int, set[int]] = {}
    for number, (is_begin, which) in enumerate(steps):
        if is_begin:
            is_open[number] = overlaps.begin("e")
            met[number] = set(is_open) - {number}
            for other in met[number]:
                met[other].add(number)
        elif is_open:
            ended = sorted(is_open)[which % len(is_open)]
            overlap = is_open.pop(ended)
            assert overlap.others == len(met[ended])
            overlap.end()
    for number, overlap in is_open.items():
        assert overlap.others == len(met[number])
