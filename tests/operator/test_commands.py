"""Our commands accept the command lines that the operator renders; the operator's own flags."""

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tandem_contract import labels
from tandem_engine.config import KvRole, parse_kv_transfer_config
from tandem_engine.events import parse_kv_events_config
from tandem_engine.main import main as engine_command
from tandem_operator.main import Settings, settings_from
from tandem_operator.main import main as operator_command
from tandem_operator.pods.manifests import pods
from tandem_sidecar.main import main as sidecar_command

from .pool_yaml import pair

TORCH: dict[str, Any] = {
    "engine": {"type": "torch", "dtype": "float32", "blockSize": 16, "maxModelLen": 512,
               "maxNumSeqs": 4, "maxNumBatchedTokens": 256},
    "model": {"name": "m", "servedNames": ["a", "b"], "source": {"path": "/models/m"}},
    "accelerator": {},
}  # fmt: skip
MINE = {"POD_IP": "127.0.1.1", "POD_NAME": "pod", "POD_UID": "uid"}


def expanded(container: dict[str, Any]) -> list[str]:
    args: list[str] = container["args"]
    for name, value in MINE.items():
        args = [arg.replace(f"$({name})", value) for arg in args]
    return args


@pytest.mark.parametrize("index", [0, 1])
def test_the_torch_engine_takes_its_arguments(index: int) -> None:
    pod = pods(pair(TORCH, {"accelerator": {}})[0])[index]
    (container,) = pod["spec"]["containers"]
    context = engine_command.make_context("tandem-engine", expanded(container))
    assert context.params["host"] == MINE["POD_IP"]
    assert context.params["served_model_name"] == ("a", "b")
    transfer = parse_kv_transfer_config(
        context.params["kv_transfer_config"], side_channel_host="127.0.1.1", side_channel_port=0
    )
    assert transfer.engine_id == "pod-uid"
    assert transfer.role is (KvRole.PRODUCER, KvRole.CONSUMER)[index]
    assert parse_kv_events_config(context.params["kv_events_config"]).topic == "kv@pod@m"


def test_the_sidecar_takes_its_arguments(tmp_path: Path) -> None:
    settings = {"accelerator": {}, "sidecar": {"prefillTimeout": "1500ms"}}
    pod = pods(pair(TORCH, settings)[0])[1]
    (container,) = pod["spec"]["initContainers"]
    args = expanded(container)
    for mount in container["volumeMounts"]:
        directory = tmp_path / mount["name"]
        directory.mkdir()
        args = [arg.replace(mount["mountPath"], str(directory)) for arg in args]
    (tmp_path / "plan-keys" / "k1").write_text("0123456789abcdef")
    flags = pod["metadata"]["annotations"][labels.SIDECAR_FLAGS]
    Path(args[args.index("--config") + 1]).write_text(flags)
    context = sidecar_command.make_context("tandem-sidecar", args)
    assert context.params["pod_name"] == "pod"
    assert context.params["prefill_timeout"] == 1.5


def test_the_operators_flags_have_the_defaults_of_its_settings() -> None:
    context = operator_command.make_context("tandem-operator", ["--all-namespaces"])
    assert settings_from(context.params) == Settings()


@pytest.mark.parametrize(
    ("flag", "default"),
    [("health", "0.0.0.0:8081"), ("metrics", "0.0.0.0:9090"), ("leader-elect", "leader-elect"),
     ("lease-duration", "15s"), ("resync", "10m"), ("log-level", "info")],
)  # fmt: skip
def test_the_operators_help_shows_defaults_with_units(flag: str, default: str) -> None:
    shown = CliRunner().invoke(operator_command, ["--help"], terminal_width=200).output
    [after] = re.findall(rf"--{flag} .*?\[default:\s+([^]]+)\]", shown, re.DOTALL)
    assert after == default


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--all-namespaces"),
        (("--namespace", "n", "--all-namespaces"), "give either --namespace NAME"),
        (("--all-namespaces", "--lease-duration", "2s"), "at least 3s"),
        (("--all-namespaces", "--resync", "0s"), "the default is 10m"),
        (("--all-namespaces", "--pod-network", "10.0.0.0/99"), "10.0.0.0/99"),
    ],
)
def test_wrong_flags_of_the_operator_exit_with_2(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(operator_command, arguments)
    assert result.exit_code == 2
    assert message in result.stderr
