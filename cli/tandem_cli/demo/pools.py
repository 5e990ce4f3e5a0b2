"""The demo's pools: one prefill pod, two decode pods, and the lone engine they are held against."""

import json
from pathlib import Path
from typing import Any, Final

from tandem_contract import labels
from tandem_contract.documents import Document, parse_documents

SERVED: Final = "demo"
"""Model name that clients ask for."""


def pair(model: Path, context: int) -> list[Document]:
    """The disaggregated pools; `context` is prompt and answer together, in tokens."""
    shared = _shared(model, context)
    return _documents(
        _pool("PrefillPool", "demo-prefill", replicas=1, **shared),
        _pool("DecodePool", "demo-decode", replicas=2, prefillRef={"name": "demo-prefill"}),
    )


def lone(model: Path, context: int) -> list[Document]:
    """One engine that does everything by itself: what it answers is right by definition."""
    shared = _shared(model, context)
    return _documents(_pool("DecodePool", "demo-alone", replicas=1, role="unified", **shared))


def _shared(model: Path, context: int) -> dict[str, Any]:
    return {
        "model": {"name": SERVED, "source": {"path": str(model)}},
        # float64: batches of different sizes round differently, and in float32 that flips a
        # greedy token once in some ten thousand.
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
    # JSON is YAML: the documents go the way of everybody's.
    return parse_documents("\n---\n".join(map(json.dumps, pools)), "the demo's pools")
