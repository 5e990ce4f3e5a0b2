"""A fake of NixlPushConnector.

    prefill   holds the KV of a finished request under its id, and writes it to the engine that
              registered with that id
    decode    registers with the engine that its object names, with its request's id, and waits

An id here is the endpoint's prefix and `X-Request-Id`: vLLM strips both sides' random suffixes.
"""

import asyncio
import json
from collections import defaultdict

from ...peers import PARAMS, Received, Turn
from . import LOCAL, answer_prefill, answer_text, computed, params_of, refuse

READ = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")
"""Fields that the decode engine reads without checking that they exist."""


class FakePushProducer:
    """Script of a prefill engine."""

    def __init__(self) -> None:
        self.kept: dict[str, asyncio.Future[str]] = defaultdict(asyncio.Future)

    async def __call__(self, turn: Turn) -> None:
        if not params_of(turn.request).get("do_remote_decode"):
            answer_prefill(turn)
            return
        request_id = _engines_id(turn.request)
        self.kept[request_id].set_result(computed(turn.request))
        params = json.loads(PARAMS) | {
            "remote_request_id": f"{request_id}-0-0badcafe",
            "transfer_mode": "push",
        }
        answer_prefill(turn, {"kv_transfer_params": params})


class FakePushConsumer:
    """Script of a decode engine."""

    def __init__(self, producer: FakePushProducer) -> None:
        self._producer = producer

    async def __call__(self, turn: Turn) -> None:
        params = params_of(turn.request)
        if not params.get("do_remote_prefill"):
            answer_text(turn, LOCAL, cached=0)
        elif not all(params.get(name) for name in READ):
            refuse(turn)
        else:
            request_id = _engines_id(turn.request)
            kv = await self._producer.kept[request_id]
            del self._producer.kept[request_id]
            answer_text(turn, f"decoded from {kv}")


def _engines_id(request: Received) -> str:
    prefix = "chatcmpl" if "chat" in request.target else "cmpl"
    return f"{prefix}-{request.headers['x-request-id']}"
