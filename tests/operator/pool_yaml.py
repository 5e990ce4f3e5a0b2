"""YAML of pools for tests: a minimal valid pair, and ways to change it."""

import copy
import json
from typing import Any

from tandem_contract.documents import Document, parse_documents
from tandem_operator.resources.pool_files import parse_pools
from tandem_operator.resources.pools import Pools

FILE = "pools.yaml"

PREFILL: dict[str, Any] = {
    "apiVersion": "tandem.dev/v1alpha1",
    "kind": "PrefillPool",
    "metadata": {"name": "p"},
    "spec": {"model": {"name": "org/model"}, "accelerator": {"count": 1}, "replicas": 1},
}
DECODE: dict[str, Any] = {
    "apiVersion": "tandem.dev/v1alpha1",
    "kind": "DecodePool",
    "metadata": {"name": "d"},
    "spec": {"prefillRef": {"name": "p"}, "accelerator": {"count": 1}, "replicas": 2},
}


def pair(prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None) -> Pools:
    """The minimal pair with these spec fields added, parsed."""
    return parse_pools(documents(prefill_pool(**(prefill or {})), decode_pool(**(decode or {}))))


def prefill_pool(**spec: Any) -> dict[str, Any]:
    return _with(PREFILL, spec)


def decode_pool(**spec: Any) -> dict[str, Any]:
    return _with(DECODE, spec)


def documents(*objects: object) -> list[Document]:
    """Documents as if read from a file, with one line for each value."""
    return parse_documents("\n---\n".join(json.dumps(o, indent=1) for o in objects), FILE)


def _with(base: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    pool = copy.deepcopy(base)
    pool["spec"] |= spec
    return pool
