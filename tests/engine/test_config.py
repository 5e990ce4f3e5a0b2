from pathlib import Path

import pytest

from tandem_engine.config import (
    ConfigError,
    EngineConfig,
    KvRole,
    KvTransferConfig,
    parse_kv_transfer_config,
)
from tandem_engine.types import LoadFailurePolicy


def parse(text: str) -> KvTransferConfig:
    return parse_kv_transfer_config(text, side_channel_host="127.0.0.2", side_channel_port=5601)


def test_vllms_json_is_read() -> None:
    assert parse(
        '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "engine_id": "e-1",'
        ' "kv_load_failure_policy": "fail", "kv_buffer_device": "cpu",'
        ' "kv_connector_extra_config": {"kv_lease_duration": 5, "backends": ["UCX"]}}'
    ) == KvTransferConfig(KvRole.CONSUMER, "e-1", 5.0, LoadFailurePolicy.FAIL, "127.0.0.2", 5601)


def test_what_is_left_out_has_a_default_and_ids_are_new_each_time() -> None:
    text = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
    first, second = parse(text), parse(text)
    assert (first.lease, first.policy) == (30.0, LoadFailurePolicy.RECOMPUTE)
    assert first.engine_id != second.engine_id
    assert first.role.consumes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ('{"kv_connector": "NixlConnector"}', "kv_role"),
        ('{"kv_connector": "P2pNcclConnector", "kv_role": "kv_both"}', "has NixlConnector"),
        ('{"kv_connector": "NixlConnector", "kv_role": "both"}', "kv_role"),
        ('{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_rolle": 1}', "kv_rolle"),
        ('{"kv_connector": "NixlConnector", "kv_role": "kv_both", "engine_id": 1}', "engine_id"),
        (
            '{"kv_connector": "NixlConnector", "kv_role": "kv_both",'
            ' "kv_connector_extra_config": {"kv_lease_duration": -1}}',
            "kv_lease_duration -1",
        ),
        (
            '{"kv_connector": "NixlConnector", "kv_role": "kv_both",'
            ' "kv_connector_extra_config": {"kv_lease_duration": "30s"}}',
            "write seconds",
        ),
        (
            '{"kv_connector": "NixlConnector", "kv_role": "kv_both",'
            ' "kv_connector_extra_config": {"kv_lease_duration": 86401}}',
            "at most a day",
        ),
        (
            '{"kv_connector": "NixlConnector", "kv_role": "kv_both",'
            ' "kv_connector_extra_config": {"num_threads": 4}}',
            "has 'num_threads': this engine knows backends and kv_lease_duration only",
        ),
        (
            '{"kv_connector": "NixlConnector", "kv_role": "kv_both",'
            f' "engine_id": "{"x" * 513}"}}',
            "engine_id has more than 512 characters",
        ),
    ],
)
def test_what_cannot_be_used_is_said(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text)


@pytest.mark.parametrize("name", ["block_size", "num_blocks", "max_num_seqs", "max_model_len"])
def test_counts_are_at_least_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0"):
        EngineConfig(Path("m"), **{name: 0})  # type: ignore[arg-type]  # an int field each


def test_the_name_is_the_directory_unless_given() -> None:
    assert EngineConfig(Path("models/m")).name == "models/m"
    assert EngineConfig(Path("models/m"), served_model_name="n").name == "n"
