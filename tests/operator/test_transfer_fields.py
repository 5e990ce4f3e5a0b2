"""The table of KVTransferConfig's fields in docs/run/vllm.md, beside what the operator renders."""

import json
import re
from pathlib import Path
from typing import Any

from .rendered_pods import engine, rendered, value_of

PAGE = Path(__file__).parents[2] / "docs" / "run" / "vllm.md"
CHAIN = {
    "connector": "multi",
    "bufferDevice": "cpu",
    "connectors": [{"connector": "nixl"}, {"connector": "offloading"}],
}


def rows() -> dict[str, tuple[str, str]]:
    """Field -> whether vLLM 0.32 has it, and the field of the pool or the reason."""
    section = (
        PAGE.read_text().partition("### Fields of KVTransferConfig\n")[2].partition("\n### ")[0]
    )
    matches = re.findall(r"^\| `(\w+)` \| (yes|no) \| (.+) \|$", section, re.MULTILINE)
    return {name: (present, place) for name, present, place in matches}


def test_every_rendered_field_is_in_the_table_with_its_place() -> None:
    prefill, decode = rendered({"transfer": CHAIN})
    configs: list[dict[str, Any]] = []
    for pod in (prefill, decode):
        config = json.loads(value_of("--kv-transfer-config", engine(pod)))
        configs += [config, *config["kv_connector_extra_config"]["connectors"]]
    names = {name for config in configs for name in config}
    with_a_place = {name for name, (present, place) in rows().items() if "no field" not in place}
    assert names == with_a_place
    assert {rows()[name][0] for name in names} == {"yes"}
