"""Times of a trace that are not rounded."""

from random import Random

import msgspec
from benchmarks.routing_live import spread

_LINES = b"""{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [7]}
{"timestamp": 3000, "input_length": 6, "output_length": 2, "hash_ids": []}

{"timestamp": 3000, "input_length": 8, "output_length": 3, "hash_ids": []}
"""


def test_requests_of_one_instant_come_apart_and_stay_within_the_rounding() -> None:
    rows = [msgspec.json.decode(line) for line in spread(_LINES, 3000, Random(1)).splitlines()]
    times = [row["timestamp"] for row in rows]
    assert 0 <= times[0] <= 3000
    assert all(3000 <= time <= 6000 for time in times[1:])
    assert len(set(times)) == len(rows)


def test_nothing_else_changes() -> None:
    rows = [msgspec.json.decode(line) for line in spread(_LINES, 3000, Random(1)).splitlines()]
    assert [row["input_length"] for row in rows] == [5, 6, 8]
    assert rows[0]["hash_ids"] == [7]
