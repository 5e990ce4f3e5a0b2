from tandem_doctor.declared import read_command


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
