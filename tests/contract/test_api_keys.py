"""API keys of clients: which files of a Secret are used, and how a client is found by its key."""

from pathlib import Path
from typing import Final

import pytest

from tandem_contract.api_keys import ApiKeys, read_keys

WITHOUT_KEY: Final[tuple[dict[str, str], ...]] = (
    {},
    {"authorization": "Bearer key"},
    {"authorization": "Bearer key-"},
    {"authorization": "Bearer "},
    {"x_api_key": ""},
    {"authorization": "Basic key-a"},
    {"x_api_key": "KEY-A"},
)
"""Headers of requests that each front refuses where key-a and key-b are the keys."""


def test_unusable_keys_are_left_out_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, content in (("empty", b"\n"), ("binary", b"\xff\x00"), ("good", b"k\r\n")):
        (tmp_path / name).write_bytes(content)
    assert read_keys(tmp_path) == {"good": "k"}
    assert {record.args[0] for record in caplog.records if record.args} == {"empty", "binary"}


def test_a_client_is_found_by_its_key(tmp_path: Path) -> None:
    for name, key in (("b", "same"), ("a", "same\n"), ("c", "other")):
        (tmp_path / name).write_text(key)
    keys = ApiKeys(tmp_path)
    assert [keys.client_of(key) for key in (b"same", b"other", b"", b"\xff")] == [
        "a",
        "c",
        None,
        None,
    ]


def test_keys_that_cannot_be_read_change_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    directory.mkdir()
    (directory / "a").write_text("key")
    keys = ApiKeys(directory)
    (directory / "a").rename(tmp_path / "a")
    directory.rmdir()
    keys.reload()
    assert keys.client_of(b"key") == "a"
    directory.mkdir()
    (directory / "b").symlink_to("b")  # unreadable, for root, too
    keys.reload()
    assert keys.client_of(b"key") == "a"
    (directory / "b").unlink()
    keys.reload()
    assert keys.client_of(b"key") is None, "an empty Secret refuses all clients"
