"""The examples are valid and render."""

from pathlib import Path

import pytest

from tandem_contract.documents import load_documents
from tandem_operator.manifests import pods
from tandem_operator.pools import parse_pools

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "prefill", "decode"), [("quickstart", 1, 2), ("llama-3-8b-nixl", 2, 4)]
)
def test_example(name: str, prefill: int, decode: int) -> None:
    (pool_set,) = parse_pools(load_documents(EXAMPLES / f"{name}.yaml"))
    assert len(pods(pool_set)) == prefill + decode
    assert all(pool.spec.initial_replicas for pool in pool_set.pools)


def test_every_example_is_tested() -> None:
    assert {f.stem for f in EXAMPLES.glob("*.yaml")} == {"quickstart", "llama-3-8b-nixl"}
