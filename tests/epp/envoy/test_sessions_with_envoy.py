"""Sessions behind real Envoy: the response names the pod, and the client sends the name back."""

import asyncio
from base64 import b64decode
from pathlib import Path

import pytest

from tandem_operator.routing.envoy.http_filters import BodyMode

from .test_with_envoy import MODES, post, running

pytestmark = [pytest.mark.component, pytest.mark.asyncio]


@MODES
async def test_a_session_stays_on_its_pod_under_load(tmp_path: Path, mode: BodyMode) -> None:
    async with running(tmp_path, mode, plugins=("session-affinity-filter",)) as stack:
        status, _, headers = await post(stack, {"model": "m", "prompt": "x"})
        token = headers["x-session-token"]
        name = b64decode(token).decode()
        assert (status, name in ("decode-1", "decode-2")) == (200, True)
        other = next(backend for backend in stack.decode if backend.name != name)
        seen = len(other.received)
        session = {"x-session-token": token}
        answers = await asyncio.gather(
            *(post(stack, {"model": "m", "prompt": f"p{i}"}, **session) for i in range(8))
        )
        assert {answer[2]["x-session-token"] for answer in answers} == {token}
        assert len(other.received) == seen
        # A token that names no pod is as good as none.
        assert (await post(stack, {"model": "m", "prompt": "y"}, **{"x-session-token": "?"}))[
            0
        ] == 200
