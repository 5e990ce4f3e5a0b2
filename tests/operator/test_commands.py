"""The rendered command lines are ones that our own commands take."""

from pathlib import Path
from typing import Any

import pytest

from tandem_engine.config import parse_kv_transfer_config
from tandem_engine.events import parse_kv_events_config
from tandem_engine.main import main as engine_command
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
    assert (transfer.role.produces, transfer.role.consumes) == (index == 0, index == 1)
    assert parse_kv_events_config(context.params["kv_events_config"]).topic == "kv@pod@m"


def test_the_sidecar_takes_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "k1").write_text("0123456789abcdef")
    pod = pods(pair(TORCH, {"accelerator": {}})[0])[1]
    (container,) = pod["spec"]["initContainers"]
    (mount,) = container["volumeMounts"]
    args = [arg.replace(mount["mountPath"], str(tmp_path)) for arg in expanded(container)]
    context = sidecar_command.make_context("tandem-sidecar", args)
    assert context.params["pod_name"] == "pod"
    assert context.params["prefill_timeout"] == 30.0
