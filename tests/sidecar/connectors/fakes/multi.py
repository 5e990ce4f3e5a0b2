"""A fake of MultiConnector: NIXL in front, another connector behind it.

P: its answer joins what each connector says
D: the first connector that has tokens loads them; each reads its own keys
"""

import json

from ...peers import PARAMS, Turn
from . import LOCAL, answer_prefill, answer_text, computed, params_of, refuse

NEEDED = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class FakeMultiProducer:
    """Script of a prefill engine."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}

    async def __call__(self, turn: Turn) -> None:
        if not params_of(turn.request).get("do_remote_decode"):
            answer_prefill(turn)
            return
        remote_id = f"cmpl-{turn.request.headers['x-request-id']}-0"
        self.kept[remote_id] = computed(turn.request)
        joined = json.loads(PARAMS) | {"remote_request_id": remote_id, "second_tier": {"hit": 3}}
        answer_prefill(turn, {"kv_transfer_params": joined})


class FakeMultiConsumer:
    """Script of a decode engine."""

    def __init__(self, producer: FakeMultiProducer) -> None:
        self._producer = producer

    async def __call__(self, turn: Turn) -> None:
        params = params_of(turn.request)
        if not params.get("do_remote_prefill"):
            answer_text(turn, LOCAL, cached=0)
        elif not all(params.get(name) for name in NEEDED) or "second_tier" not in params:
            refuse(turn)
        else:
            kv = self._producer.kept.pop(params["remote_request_id"])
            answer_text(turn, f"decoded from {kv}")
