"""The examples, and those on the docs page about custom resources, are valid and render."""

import re
from pathlib import Path

import pytest

from tandem_contract.documents import load_documents, parse_documents
from tandem_operator.pods.manifests import pods
from tandem_operator.resources.pool_files import parse_pools

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs/run/pools.md"
SNIPPETS = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


TESTED = {
    "quickstart": (1, 2), "llama-3-8b-nixl": (2, 6), "vllm": (1, 1), "vllm-cpu": (1, 1),
    "storage": (1, 1), "llama-3.3-70b-rdma": (1, 2),
}  # fmt: skip
"""Number of prefill pods and of decode pods, by example."""


@pytest.mark.parametrize("name", TESTED)
def test_example(name: str) -> None:
    prefill, decode = TESTED[name]
    (pool_set,) = parse_pools(load_documents(EXAMPLES / f"{name}.yaml"))
    assert len(pods(pool_set)) == prefill + decode
    assert all(pool.spec.initial_replicas for pool in pool_set.pools)


def test_every_example_is_tested() -> None:
    assert {f.stem for f in EXAMPLES.glob("*.yaml")} == TESTED.keys()


def test_the_page_about_70b_explains_every_line_of_its_example() -> None:
    page = (ROOT / "docs/run/70b-rdma.md").read_text()
    explained = "".join(re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    file = (EXAMPLES / "llama-3.3-70b-rdma.yaml").read_text().splitlines(keepends=True)
    assert explained == "".join(x for x in file if not x.startswith(("#", "---")))


@pytest.mark.parametrize("text", SNIPPETS)
def test_examples_of_the_docs_page(text: str) -> None:
    (pool_set,) = parse_pools(parse_documents(text, PAGE.name))
    assert pods(pool_set)


def test_the_quickstart_runs_under_restricted_pod_security() -> None:
    for pool_set in parse_pools(load_documents(EXAMPLES / "quickstart.yaml")):
        for pod in pods(pool_set):
            volumes = {kind for volume in pod["spec"]["volumes"] for kind in volume} - {"name"}
            assert volumes <= {"emptyDir", "secret", "configMap", "projected", "downwardAPI"}
