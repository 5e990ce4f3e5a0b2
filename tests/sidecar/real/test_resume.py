"""A stream goes on at its plan's alternate after this pod's engine was killed."""

import time
from pathlib import Path
from typing import Any

import pytest

from tandem_contract import headers
from tandem_contract.paths import RoutingPath
from tandem_contract.plan import Plan, Target, load_keys, sign
from tandem_contract.request_kinds import PATHS, RequestKind

from ..resume.scripted import events
from .engine import Engine
from .pair import SPLIT, Pair, start_pair

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]

TOKENS = 200
BODIES: dict[RequestKind, dict[str, Any]] = {
    RequestKind.COMPLETIONS: {"prompt": "Rivers and lakes. " * 8},
    RequestKind.CHAT: {"messages": [{"role": "user", "content": "Tell me of rivers. " * 8}]},
}


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("path", [RoutingPath.UNIFIED, SPLIT])
async def test_the_client_cannot_tell(
    decode: Engine,
    unified: Engine,
    prefill: Engine,
    tmp_path: Path,
    kind: RequestKind,
    path: RoutingPath,
) -> None:
    (tmp_path / "k1").write_bytes(b"0123456789abcdef")
    flags = ("--plan-key-dir", str(tmp_path), "--resume")
    body = BODIES[kind] | {
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with (
        start_pair(decode, *flags) as first,
        start_pair(unified, *flags, "--pod-name", "decode-1") as second,
    ):
        prefills = (Target("prefill-0", str(prefill.address)),) if path is SPLIT else ()

        def plan(pod: Pair, name: str, request_id: str, *alternates: Target) -> dict[str, str]:
            now, decodes = time.time(), Target(name, str(pod.sidecar.listen))
            parts = Plan(
                path,
                "unit",
                decodes,
                prefills,
                request_id=request_id,
                expires=now + 60,
                alternates=alternates,
            )
            signed = sign(parts, load_keys(tmp_path), now=now)
            return {headers.PLAN: signed, headers.REQUEST_ID: request_id}

        url, unbroken = second.sidecar.url(PATHS[kind]), plan(second, "decode-1", "r-1")
        async with second.http.post(url, json=body, headers=unbroken) as response:
            expected = events(await response.read())
        alternate = Target("decode-1", str(second.sidecar.listen))
        url, broken = first.sidecar.url(PATHS[kind]), plan(first, "decode-0", "r-2", alternate)
        async with first.http.post(url, json=body, headers=broken) as response:
            begin = await response.content.readuntil(b"\n\n")
            decode.kill()
            got = events(begin + await response.read())
        assert text_of(got) == text_of(expected)
        assert len({event["id"] for event in got}) == 1
        assert got[-2]["choices"][0]["finish_reason"] == "length"
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert got[-1]["usage"][count] == expected[-1]["usage"][count]
        assert await second.finished_on(path) == 2
        await second.wait_until_idle(unified)


def text_of(stream: list[Any]) -> str:
    choices = [choice for event in stream for choice in event["choices"]]
    return "".join(each["text"] if "text" in each else each["delta"]["content"] for each in choices)
