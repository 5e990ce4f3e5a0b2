"""Bounds of a namespace that change while an engine runs."""

import json
import logging
import sys
from pathlib import Path

import pytest

from tandem_kvstore.bounds_file import BoundsFile
from tandem_kvstore.format.collection import Bounds
from tandem_kvstore.settings import EngineStoreSettings

WEEK = 7 * 86400.0


@pytest.mark.parametrize(
    ("content", "bounds"),
    [
        ({}, None),
        ({"capacity_bytes": 0}, None),
        ({"capacity_bytes": 5}, Bounds(5, WEEK)),
        ({"max_age_seconds": 60}, Bounds(sys.maxsize, 60.0)),
        ({"capacity_bytes": 5, "max_age_seconds": 60.0}, Bounds(5, 60.0)),
    ],
)
def test_a_file_may_state_either_bound_or_both(
    tmp_path: Path, content: dict[str, float], bounds: Bounds | None
) -> None:
    file = tmp_path / "bounds.json"
    file.write_text(json.dumps(content))
    assert BoundsFile(file, None, WEEK).read() == bounds


def test_the_file_wins_over_the_settings_as_soon_as_it_can_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "bounds.json"
    read = EngineStoreSettings(capacity_bytes=9, bounds_file=str(file)).bounds_reader()
    assert read is not None
    with caplog.at_level(logging.WARNING):
        assert [read(), read()] == [Bounds(9, WEEK)] * 2
        file.write_text('{"capacity_bytes": 7}')
        assert read() == Bounds(7, WEEK)
        broken = (
            b"",
            b"[]",
            b'{"capacity": 1}',
            b'{"capacity_bytes": "1"}',
            b'{"\xff": 1}',
            *(b'{"capacity_bytes": -1}', b'{"max_age_seconds": 0}', b'{"max_age_seconds": -1.0}'),
        )
        for content in broken:
            file.write_bytes(content)
            assert read() == Bounds(7, WEEK)
        file.write_text("{}")
        assert read() is None
    # Each fault once: the file is read in every round of the collector.
    assert len(caplog.messages) == 9


def test_without_a_file_the_settings_hold() -> None:
    assert EngineStoreSettings().bounds_reader() is None
    read = EngineStoreSettings(capacity_bytes=9, max_age_seconds=1.0).bounds_reader()
    assert read is not None
    assert read() == Bounds(9, 1.0)


def test_an_age_at_which_every_chunk_is_deleted_is_refused() -> None:
    assert EngineStoreSettings(max_age_seconds=0.0).fault(16) == "max_age_seconds must be above 0"
