"""LoRA adapters count by their content: which files change the keys of their prompts."""

import os
from pathlib import Path

import pytest

from tandem_vllm_storage.identity import adapter_hash
from tandem_vllm_storage.settings import StorageConfigError

CONFIG = '{"r": 8, "lora_alpha": 16}'


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of digests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def adapter(directory: Path, weights: bytes = b"weights", config: str = CONFIG) -> Path:
    """Write an adapter as a tool does that gives all files the same time, such as an image's."""
    directory.mkdir(exist_ok=True)
    for name, content in (
        ("adapter_model.safetensors", weights),
        ("adapter_config.json", config.encode()),
    ):
        fresh = directory / f".{name}"
        fresh.write_bytes(content)
        os.utime(fresh, ns=(0, 0))
        fresh.replace(directory / name)
    return directory


def test_equal_adapters_have_one_hash_wherever_they_lie(tmp_path: Path) -> None:
    one, other = adapter(tmp_path / "one"), adapter(tmp_path / "other")
    assert adapter_hash(one) == adapter_hash(other)


def test_an_adapter_that_is_replaced_without_a_new_time_has_another_hash(tmp_path: Path) -> None:
    before = adapter_hash(adapter(tmp_path / "one"))
    assert adapter_hash(adapter(tmp_path / "one", weights=b"WEIGHTS")) != before
    assert adapter_hash(adapter(tmp_path / "one", weights=b"longer weights")) != before


def test_the_scale_of_an_adapter_changes_its_hash(tmp_path: Path) -> None:
    before = adapter_hash(adapter(tmp_path / "one"))
    scaled = adapter(tmp_path / "one", config=CONFIG.replace("16", "32"))
    assert adapter_hash(scaled) != before


def test_an_adapter_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageConfigError, match="has no weights in files"):
        adapter_hash(tmp_path)
