from tandem_doctor.declared import read_command
from tandem_doctor.facts import Declared


def test_flags_are_read_as_the_engine_would() -> None:
    words = [
        *("vllm", "serve", "m", "--dtype", "bfloat16", "--block_size=16", "--enforce-eager"),
        *("--dtype", "float32", "--kv-transfer-config", '{"engine_id": "$(POD_NAME)"}'),
    ]
    declared = read_command(words, {"POD_NAME": "p-0"})
    assert declared.flags["model"] == "m"
    assert declared.flags["dtype"] == "float32"
    assert declared.flags["block-size"] == "16"
    assert declared.flags["enforce-eager"] == "true"
    assert declared.transfer == {"engine_id": "p-0"}


def test_a_configuration_that_is_none_is_empty() -> None:
    assert read_command(["--kv-transfer-config", "{"], {}).transfer == {}
    assert read_command(["--kv-transfer-config"], {}).transfer == {}
    assert read_command([], {}).flags == {}


def test_short_flags_and_negated_switches_are_read_too() -> None:
    words = ["-tp", "2", "-sc", '{"method": "mtp"}', "--no-disable-hybrid-kv-cache-manager"]
    assert read_command(words, {}).flags == {
        "tensor-parallel-size": "2",
        "speculative-config": '{"method": "mtp"}',
        "disable-hybrid-kv-cache-manager": "false",
    }


def test_a_chain_is_known_by_what_is_in_it() -> None:
    chain = {"connectors": [{"kv_connector": "NixlConnector"}, {"kv_connector": "Other"}]}
    many = Declared({}, {"kv_connector": "MultiConnector", "kv_connector_extra_config": chain})
    assert many.connectors == ("NixlConnector", "Other")
    assert many.uses("Nixl")
    assert Declared({}, {"kv_connector": "NixlPushConnector"}).uses("Nixl")
    assert not Declared({}, {"kv_connector": "MooncakeConnector"}).uses("Nixl")
