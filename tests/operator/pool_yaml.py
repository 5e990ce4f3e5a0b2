"""YAML of pools for tests: a minimal valid pair, and ways to change it."""

import copy
import json
from functools import lru_cache
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
    return parsed_pools(prefill_pool(**(prefill or {})), decode_pool(**(decode or {})))


def parsed_pools(*objects: object) -> Pools:
    """The objects, parsed: 10 ms, so that tests with equal ones share the result."""
    return _pools(_text(*objects))


@lru_cache(512)
def _pools(text: str) -> Pools:
    return parse_pools(parse_documents(text, FILE))


def prefill_pool(**spec: Any) -> dict[str, Any]:
    return _with(PREFILL, spec)


def decode_pool(**spec: Any) -> dict[str, Any]:
    return _with(DECODE, spec)


def documents(*objects: object) -> list[Document]:
    """Documents as if read from a file, with one line for each value."""
    return parse_documents(_text(*objects), FILE)


def _text(*objects: object) -> str:
    return "\n---\n".join(json.dumps(each, indent=1) for each in objects)


def _with(base: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    pool = copy.deepcopy(base)
    pool["spec"] |= spec
    return pool
