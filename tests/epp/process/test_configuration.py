"""The configuration file: errors, and reloads that keep the last good configuration."""

import asyncio
import os
import time
from math import inf
from pathlib import Path

import pytest

from tandem_contract.documents import DocumentError
from tandem_epp.process.configuration import FileWatch, load, log_notices, reload, reload_keys

GOOD = "backends: [{name: a, url: 'http://10.0.0.1:8000'}]\n"


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "router.yaml"
    file.write_text(text)
    return file


def test_one_file_holds_backends_and_scheduling(tmp_path: Path) -> None:
    text = GOOD + "disaggregated_serving: {enabled: true}\nplugins: [{type: random-picker}]\n"
    loaded = load(written(tmp_path, text), {})
    assert [backend.name for backend in loaded.router.backends] == ["a"]
    assert loaded.routing.serving.enabled


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "router.yaml:1: expected one YAML mapping"),
        ("backends: []\n", "router.yaml:1: backends: the list is empty"),
        ("plugins: []\n", "backends: the list is empty"),
        (GOOD + "plugins:\n- type: queue-score\n", "router.yaml:3: .*did you mean 'queue-scorer'"),
        (GOOD + "a: [\n", "router.yaml:3: not YAML"),
    ],
)
def test_an_invalid_file_is_reported_with_its_line(
    tmp_path: Path, text: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = written(tmp_path, text)
    with pytest.raises(DocumentError, match=message):
        load(file, {})
    assert reload(file, {}) is None
    assert "the last good one stays" in caplog.text
    assert "router.yaml:" in caplog.text


def test_with_kubernetes_discovery_the_file_must_not_list_backends(tmp_path: Path) -> None:
    serving = "disaggregated_serving: {enabled: true}\n"
    assert load(written(tmp_path, serving), {}, lists_backends=False).routing.serving.enabled
    with pytest.raises(DocumentError, match=r"router.yaml:1: backends: .* from the cluster"):
        load(written(tmp_path, GOOD), {}, lists_backends=False)


def test_a_gate_of_the_command_line_overrides_the_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = GOOD + "featureGates: [flowControl]\nsaturationDetector: {}\n"
    file = written(tmp_path, text)
    log_notices(load(file, {}))
    assert not caplog.text
    assert load(file, {}).routing.scheduling.flow is not None
    gates = {"flowControl": False}
    configuration = reload(file, {}, gates=gates)
    assert configuration is not None
    assert configuration.routing.scheduling.flow is None
    assert "saturationDetector has no effect" in caplog.text


def test_invalid_keys_are_logged_and_valid_ones_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "k1").write_bytes(b"short")
    assert reload_keys(tmp_path) is None
    assert "at least 16 bytes" in caplog.text
    (tmp_path / "k1").write_bytes(b"long enough to be a key")
    assert reload_keys(tmp_path) == {"k1": b"long enough to be a key"}
    (tmp_path / "k1").unlink()
    assert reload_keys(tmp_path) is None
    assert f"{tmp_path} has no key" in caplog.text


@pytest.mark.parametrize("file_change", ["rewritten", "swapped link", "gone and back"])
async def test_every_kind_of_file_change_is_noticed(tmp_path: Path, file_change: str) -> None:
    file, changed = written(tmp_path, GOOD), asyncio.Event()
    if file_change == "swapped link":
        (tmp_path / "v1").write_text(GOOD)
        (tmp_path / "v2").write_text(GOOD)
        file.unlink()
        file.symlink_to(tmp_path / "v1")
    watching = FileWatch(file, changed.set, interval=0.01, read_after=inf)
    watch = asyncio.create_task(watching.run())
    try:
        if file_change == "rewritten":
            file.write_text(GOOD * 2)
        elif file_change == "swapped link":
            (tmp_path / "new").symlink_to(tmp_path / "v2")
            os.replace(tmp_path / "new", file)
        else:
            file.unlink()
            await asyncio.wait_for(changed.wait(), 20)
            changed.clear()
            file.write_text(GOOD)
        await asyncio.wait_for(changed.wait(), 20)
    finally:
        watch.cancel()


async def test_a_file_that_changed_during_the_start_is_read_again(tmp_path: Path) -> None:
    """It may have changed between its first reading and the watch."""
    changed = asyncio.Event()
    before = time.time() - 1.0
    file = written(tmp_path, GOOD)
    watch = FileWatch(file, changed.set, interval=0.01, read_after=before)
    running = asyncio.create_task(watch.run())
    try:
        await asyncio.wait_for(changed.wait(), 20)
    finally:
        running.cancel()
