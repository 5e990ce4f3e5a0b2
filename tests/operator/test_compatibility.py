"""Fields that a DecodePool inherits from its PrefillPool, and fields that it does not."""

from typing import Any

import pytest

from tandem_operator.resources.compatibility import inherit

PREFILL: dict[str, Any] = {
    "model": {"name": "m", "source": {"tiny": {"seed": 1}}},
    "engine": {"version": "0.32.0", "image": "a:v0.32.0", "imagePullPolicy": "Always",
               "tuning": "off", "maxNumSeqs": 4, "resources": {"requests": {"cpu": 1}},
               "blockSize": 16},
    "transfer": {"connector": "nixl", "rdma": {"resource": "rdma/ib", "count": 1},
                 "requireRdma": True},
    "accelerator": {"count": 2},
    "placement": {"topologyKey": "zone"},
}  # fmt: skip


def test_shared_and_transfer_fields_are_inherited() -> None:
    merged = inherit(PREFILL, {"prefillRef": {"name": "p"}})
    assert merged == {
        "prefillRef": {"name": "p"},
        "model": PREFILL["model"],
        "engine": {"version": "0.32.0", "image": "a:v0.32.0", "imagePullPolicy": "Always",
                   "blockSize": 16},
        "transfer": PREFILL["transfer"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("section", "own"),
    [("transfer", {"rdma": {"resource": "vpc.amazonaws.com/efa", "count": 4}}),
     ("engine", {"imagePullPolicy": "Never"}), ("engine", {"image": "b:v0.32.0"})],
)  # fmt: skip
def test_fields_of_the_decode_pool_are_kept(section: str, own: dict[str, Any]) -> None:
    assert inherit(PREFILL, {section: own})[section].items() >= own.items()


def test_the_input_is_not_changed() -> None:
    merged = inherit(PREFILL, {})
    merged["model"]["source"]["tiny"]["seed"] = 2
    assert PREFILL["model"]["source"] == {"tiny": {"seed": 1}}
