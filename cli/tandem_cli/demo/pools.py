"""The demo's pools: one prefill pod, two decode pods, and the single engine to compare with."""

import json
from pathlib import Path
from typing import Any, Final

from tandem_contract import labels
from tandem_contract.documents import Document, parse_documents

SERVED: Final = "demo"
"""Model name in requests."""


def pair(model: Path, context: int) -> list[Document]:
    """The disaggregated pools; `context`: tokens of prompt and answer together, at most."""
    shared = _shared(model, context)
    return _documents(
        _pool("PrefillPool", "demo-prefill", replicas=1, **shared),
        _pool("DecodePool", "demo-decode", replicas=2, prefillRef={"name": "demo-prefill"}),
    )


def single_engine(model: Path, context: int) -> list[Document]:
    """One engine that serves both phases: the demo takes its answers as the correct ones."""
    shared = _shared(model, context)
    return _documents(_pool("DecodePool", "demo-single", replicas=1, role="unified", **shared))


def _shared(model: Path, context: int) -> dict[str, Any]:
    return {
        "model": {"name": SERVED, "source": {"path": str(model)}},
        # float64: rounding depends on the size of the batch, and in float32 that changes about one
        # greedy token in ten thousand.
        "engine": {"type": "torch", "dtype": "float64", "maxModelLen": context},
    }


def _pool(kind: str, name: str, **spec: object) -> dict[str, Any]:
    return {
        "apiVersion": labels.API_VERSION,
        "kind": kind,
        "metadata": {"name": name},
        "spec": spec,
    }


def _documents(*pools: dict[str, Any]) -> list[Document]:
    # JSON is YAML: the documents take the same code path as files of users.
    return parse_documents("\n---\n".join(map(json.dumps, pools)), "the demo's pools")
