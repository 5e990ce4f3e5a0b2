"""vLLM's own parser reads what the operator renders: command lines and KVTransferConfig.

No engine starts. The command lines are the golden ones of the operator's tests, for the version
that is tested here, and those of the examples for GPUs; `TANDEM_VLLM_PYTHON` names an
interpreter with another vLLM.
"""

import json
import os
import shlex
import subprocess
from typing import Any, Final

import pytest

from tandem_contract.documents import load_documents
from tandem_contract.vllm_storage import CONNECTOR, MODULE_PATH
from tandem_operator.pods.manifests import pods
from tandem_operator.resources.pool_files import parse_pools

from ..operator.rendered_pods import engine
from ..operator.test_engines import GOLDEN, VERSIONS
from ..operator.test_examples import EXAMPLES
from ..operator.test_transfer_fields import rows
from .engines import VENV

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

_PARSE: Final = """
import dataclasses, json, sys
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser())
configs = {}
for name, argv in json.load(sys.stdin).items():
    try:
        args = parser.parse_args(argv)
    except SystemExit:
        sys.exit(f"{name} was refused")
    chosen = args.kv_transfer_config
    configs[name] = {
        "adapters": len(args.lora_modules or ()),
        "transfer": dataclasses.asdict(chosen) if chosen else None,
    }
print(json.dumps({
    "configs": configs,
    "fields": [field.name for field in dataclasses.fields(KVTransferConfig)],
    "connectors": list(KVConnectorFactory._registry),
}))
"""


def command_lines() -> dict[str, list[str]]:
    """Case and side of a pool → the arguments of its engine, without the program's name."""
    golden = json.loads((GOLDEN / f"{VERSIONS[-1]}.json").read_text())
    lines = {
        f"{case}-{side}": shlex.split(settings["argv"])[2:]
        for case, sides in golden.items()
        for side, settings in sides.items()
    }
    for name in ("llama-3-8b-nixl", "llama-3.3-70b-rdma"):
        (pool_set,) = parse_pools(load_documents(EXAMPLES / f"{name}.yaml"))
        for pod in pods(pool_set):
            lines[pod["metadata"]["name"]] = engine(pod)["args"]
    return {
        name: [argument.replace("$(POD_IP)", "10.0.0.1") for argument in argv]
        for name, argv in lines.items()
    }


def rendered_transfer(argv: list[str]) -> dict[str, Any] | None:
    """The KVTransferConfig of a command line, as the operator writes it."""
    flag = "--kv-transfer-config"
    return json.loads(argv[argv.index(flag) + 1]) if flag in argv else None


@pytest.fixture(scope="module")
def parsed() -> dict[str, Any]:
    """What vLLM makes of the command lines, its fields of KVTransferConfig and its connectors."""
    completed = subprocess.run(
        [os.environ.get("TANDEM_VLLM_PYTHON", str(VENV / "bin/python")), "-c", _PARSE],
        input=json.dumps(command_lines()),
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        check=False,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr
    result: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
    return result


def test_every_command_line_is_accepted(parsed: dict[str, Any]) -> None:
    assert parsed["configs"].keys() == command_lines().keys()
    assert parsed["configs"]["lora-prefill"]["adapters"] == 2


def test_every_rendered_transfer_field_is_read_as_it_is_written(parsed: dict[str, Any]) -> None:
    for name, argv in command_lines().items():
        written, read = rendered_transfer(argv), parsed["configs"][name]["transfer"]
        if written is None:
            assert read is None, name
            continue
        assert read is not None, name
        assert {field: read[field] for field in written} == written, name


def test_chained_connectors_are_configurations_of_their_own(parsed: dict[str, Any]) -> None:
    configs = [parsed["configs"][f"multi-{side}"]["transfer"] for side in ("prefill", "decode")]
    for config in configs:
        assert config["kv_connector"] == "MultiConnector"
        chain = config["kv_connector_extra_config"]["connectors"]
        assert [link["kv_connector"] for link in chain] == ["NixlConnector", "OffloadingConnector"]
        # vLLM builds one KVTransferConfig from each.
        assert {field for link in chain for field in link} <= set(parsed["fields"])


def test_storage_comes_last_in_a_chain_and_brings_its_module(parsed: dict[str, Any]) -> None:
    for side in ("prefill", "decode"):
        config = parsed["configs"][f"nixl-storage-{side}"]["transfer"]
        nixl, stored = config["kv_connector_extra_config"]["connectors"]
        assert nixl["kv_connector"] == "NixlConnector"
        assert (stored["kv_connector"], stored["kv_role"]) == (CONNECTOR, "kv_both")
        alone = parsed["configs"][f"storage-{side}"]["transfer"]
        for link in (stored, alone):
            assert link["kv_connector_module_path"] == MODULE_PATH
            assert link["kv_load_failure_policy"] == "recompute"


def test_offloading_alone_is_a_connector_of_one_engine(parsed: dict[str, Any]) -> None:
    config = parsed["configs"]["offloading-alone-unified"]["transfer"]
    assert (config["kv_connector"], config["kv_role"]) == ("OffloadingConnector", "kv_both")
    assert config["kv_connector_extra_config"]["cpu_bytes_to_use"] > 0
    assert parsed["configs"]["alone-unified"]["transfer"] is None


def test_every_rendered_connector_is_one_of_vllms(parsed: dict[str, Any]) -> None:
    configs = [config["transfer"] for config in parsed["configs"].values() if config["transfer"]]
    links = [
        link
        for config in configs
        for link in (
            config,
            *(config["kv_connector_extra_config"] or {}).get("connectors", ()),
        )
    ]
    own = {link["kv_connector"] for link in links if link.get("kv_connector_module_path")}
    assert own == {CONNECTOR}
    assert {link["kv_connector"] for link in links} - own <= set(parsed["connectors"])


def test_the_table_of_fields_is_vllms(parsed: dict[str, Any]) -> None:
    present = {name for name, (is_present, _) in rows().items() if is_present == "yes"}
    assert present == set(parsed["fields"])
