"""Fakes of vLLM's connectors, true to the protocol as its 0.32 source has it; no vLLM runs here.

Each is a pair of scripts for `peers.FakePrefill` and `peers.FakeDecode`, with real servers for the
messages between the engines. They refuse incomplete requests as the real connector does. `computed`
stands for the KV of a prompt, so that an answer shows where its KV came from.
"""

import json
from typing import Any

from ...peers import Received, Turn

LOCAL = "computed here"


def computed(request: Received) -> str:
    """Stands for the KV of the request's prompt."""
    return f"kv of {request.json.get('prompt')}"


def params_of(request: Received) -> dict[str, Any]:
    return request.json.get("kv_transfer_params") or {}


def answer_text(turn: Turn, text: str, cached: int = 1500) -> None:
    """A completion by a decode engine that counts all received tokens as cached."""
    usage = {"prompt_tokens": 1500, "prompt_tokens_details": {"cached_tokens": cached}}
    body = {"choices": [{"text": text, "finish_reason": "stop"}], "usage": usage}
    turn.answer(200, json.dumps(body).encode())


def answer_prefill(turn: Turn, more: dict[str, Any] | None = None, finish: str = "length") -> None:
    usage = {"prompt_tokens": 1500, "prompt_tokens_details": {"cached_tokens": 32}}
    body = {"choices": [{"text": "x", "finish_reason": finish}], "usage": usage, **(more or {})}
    turn.answer(200, json.dumps(body).encode())


def refuse(turn: Turn) -> None:
    """End like an engine after a failed assertion: all its connections break."""
    turn.die()
