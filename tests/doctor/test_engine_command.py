from tandem_doctor.engine_command import parse_command
from tandem_doctor.facts import EngineCommand


def test_flags_are_parsed_as_the_engine_does() -> None:
    words = [
        *("vllm", "serve", "m", "--dtype", "bfloat16", "--block_size=16", "--enforce-eager"),
        *("--dtype", "float32", "--kv-transfer-config", '{"engine_id": "$(POD_NAME)"}'),
    ]
    command = parse_command(words, {"POD_NAME": "p-0"})
    assert command.flags["model"] == "m"
    assert command.flags["dtype"] == "float32"
    assert command.flags["block-size"] == "16"
    assert command.flags["enforce-eager"] == "true"
    assert command.kv_transfer_config == {"engine_id": "p-0"}


def test_an_invalid_transfer_config_counts_as_empty() -> None:
    assert parse_command(["--kv-transfer-config", "{"], {}).kv_transfer_config == {}
    assert parse_command(["--kv-transfer-config"], {}).kv_transfer_config == {}
    assert parse_command([], {}).flags == {}


def test_short_flags_and_negated_switches() -> None:
    words = ["-tp", "2", "-sc", '{"method": "mtp"}', "--no-disable-hybrid-kv-cache-manager"]
    assert parse_command(words, {}).flags == {
        "tensor-parallel-size": "2",
        "speculative-config": '{"method": "mtp"}',
        "disable-hybrid-kv-cache-manager": "false",
    }


def test_a_multi_connector_counts_as_its_members() -> None:
    chain = {"connectors": [{"kv_connector": "NixlConnector"}, {"kv_connector": "Other"}]}
    multi = EngineCommand(
        {}, {"kv_connector": "MultiConnector", "kv_connector_extra_config": chain}
    )
    assert multi.connectors == ("NixlConnector", "Other")
    assert multi.uses("Nixl")
    assert EngineCommand({}, {"kv_connector": "NixlPushConnector"}).uses("Nixl")
    assert not EngineCommand({}, {"kv_connector": "MooncakeConnector"}).uses("Nixl")
