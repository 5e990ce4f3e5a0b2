"""A stream goes on at the pod that its plan names as an alternate, through that pod's sidecar."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem_contract import headers
from tandem_contract.paths import RoutingPath
from tandem_contract.plan import Plan, ResumeLimits, Target, sign
from tandem_contract.plan_keys import PlanKeys
from tandem_contract.prompt_length import EXHAUSTING
from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_contract.trace import SidecarTrace

from ..conftest import Harness
from ..peers import FakePrefill, Script, Turn, hangs
from . import answers
from .answers import TOOL
from .events import DONE
from .scripted import (
    ENDS,
    PROMPT,
    TOKENS,
    End,
    asked,
    dies,
    events,
    generates,
    text_of,
    until_gone,
    without_head,
)

ID = "r-1"


class Pods:
    """Two decode pods, each with a sidecar, and prefill pods that both may use."""

    def __init__(self, first: Harness, second: Harness, keys: PlanKeys) -> None:
        self.first, self.second, self.keys = first, second, keys
        self.resume: ResumeLimits | None = None
        """What the plans ask for."""

    def plan(self, *prefills: FakePrefill) -> dict[str, str]:
        """Headers of a request for the first pod, with the second as its alternate."""
        now = time.time()
        plan = Plan(
            RoutingPath.PREFILL_THEN_DECODE if prefills else RoutingPath.UNIFIED,
            "unit",
            Target("decode-0", str(self.first.sidecar.listen)),
            tuple(Target(f"prefill-{n}", str(p.address)) for n, p in enumerate(prefills)),
            request_id=ID,
            expires=now + 60,
            alternates=(Target("decode-1", str(self.second.sidecar.listen)),),
            resume=self.resume,
        )
        signed = sign(plan, self.keys.current, now=now)
        return {headers.PLAN: signed, headers.REQUEST_ID: ID}

    async def ask(
        self, kind: RequestKind, *prefills: FakePrefill, keeps_ids: bool = False, **more: Any
    ) -> tuple[int, bytes]:
        more |= {"return_token_ids": True} if keeps_ids else {}
        body = asked(is_chat=kind is not RequestKind.COMPLETIONS, **more)
        url, plan = self.first.url(PATHS[kind]), self.plan(*prefills)
        async with self.first.http.post(url, json=body, headers=plan) as response:
            return response.status, await response.read()


@asynccontextmanager
async def two_pods(
    harness: Harness,
    folder: Path,
    *,
    resume: bool,
    keys_of_second: PlanKeys | None = None,
    **changes: Any,
) -> AsyncIterator[Pods]:
    """`changes`: of the sidecars' settings."""
    (folder / "k").write_text("0123456789abcdef")
    keys = PlanKeys(folder)
    async with AsyncExitStack() as stack:
        second = Harness(stack)
        await harness.start(keys=keys, resume=resume, **changes)
        changes |= {"pod_name": "decode-1"}
        await second.start(keys=keys_of_second or keys, resume=resume, **changes)
        yield Pods(harness, second, keys)


@pytest.fixture
async def pods(harness: Harness, tmp_path: Path) -> AsyncIterator[Pods]:
    async with two_pods(harness, tmp_path, resume=True) as running:
        yield running


@pytest.fixture
async def pods_without_flag(harness: Harness, tmp_path: Path) -> AsyncIterator[Pods]:
    async with two_pods(harness, tmp_path, resume=False) as running:
        yield running


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", [RequestKind.COMPLETIONS, RequestKind.CHAT])
async def test_the_client_gets_the_stream_of_one_engine(
    pods: Pods, end: End, split: bool, kind: RequestKind
) -> None:
    prefills = [await pods.first.prefill()] if split else []
    first, second = pods.first.decode, pods.second.decode
    for keeps_ids in (False, True):
        first.script = generates()
        _, whole = await pods.ask(kind, *prefills, keeps_ids=keeps_ids)
        second.script = generates(id="cmpl-of-another")
        for after in range(TOKENS):
            first.script = generates(after, end)
            asked_before = len(second.requests)
            status, resumed = await pods.ask(kind, *prefills, keeps_ids=keeps_ids)
            assert status == 200
            assert without_head(events(resumed)) == without_head(events(whole)), after
            assert len(second.requests) == asked_before + 1


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", [RequestKind.CHAT, RequestKind.RESPONSES])
async def test_an_answer_is_generated_again(pods: Pods, split: bool, kind: RequestKind) -> None:
    prefills = [await pods.first.prefill()] if split else []
    more = {"temperature": 0, "input": "think " * 40, "tools": [TOOL]}
    events = answers.Engine("first").answer(kind, json.dumps(asked(is_chat=True, **more)).encode())
    pods.second.decode.script = sends(answers.Engine("other"), kind)
    for after in range(5, len(events) - 1):
        pods.first.decode.script = sends(answers.Engine("first"), kind, after)
        status, resumed = await pods.ask(kind, *prefills, **more)
        assert status == 200
        got = answers.comparable(answers.read([resumed]))
        assert got == answers.comparable(answers.read(events)), after
        body = pods.second.decode.requests[-1].body
        assert body.count(b'"request_id"') == (kind is RequestKind.RESPONSES)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("split", [False, True])
async def test_an_answer_is_generated_again_however_it_ended(
    pods: Pods, end: End, split: bool
) -> None:
    prefills = [await pods.first.prefill()] if split else []
    kind, more = RequestKind.CHAT, {"temperature": 0, "presence_penalty": 1}
    pods.first.decode.script = generates()
    _, whole = await pods.ask(kind, *prefills, **more)
    pods.second.decode.script = generates(id="cmpl-of-another")
    for after in range(1, TOKENS):
        pods.first.decode.script = generates(after, end)
        _, resumed = await pods.ask(kind, *prefills, **more)
        assert text_of(resumed) == text_of(whole), after
        assert "error" not in events(resumed)[-1]
    assert len(pods.second.decode.requests) == TOKENS - 1


async def test_a_plan_asks_for_it_without_the_flag(pods_without_flag: Pods) -> None:
    pods = pods_without_flag
    pods.first.decode.script, pods.second.decode.script = generates(3), generates()
    _, broken = await pods.ask(RequestKind.COMPLETIONS)
    assert "error" in events(broken)[-1]
    # No engine is asked for ids in vain.
    assert "return_token_ids" not in pods.first.decode.requests[-1].json
    pods.resume = ResumeLimits()
    _, resumed = await pods.ask(RequestKind.COMPLETIONS)
    pods.first.decode.script = generates()
    _, whole = await pods.ask(RequestKind.COMPLETIONS)
    assert without_head(events(resumed)) == without_head(events(whole))


async def test_the_limits_of_a_plan_hold_instead_of_the_flags(pods: Pods) -> None:
    kind, more = RequestKind.CHAT, {"temperature": 0, "presence_penalty": 1}
    pods.first.decode.script = sends(answers.Engine("first"), kind, 5)
    pods.second.decode.script = sends(answers.Engine("other"), kind)
    for limits, ends_in_error in ((None, False), (ResumeLimits(0.0), True)):
        pods.resume = limits
        _, body = await pods.ask(kind, **more)
        assert (b"nothing is generated again" in body) == ends_in_error


async def test_a_stream_moves_as_often_as_its_plan_allows(pods: Pods) -> None:
    pods.first.decode.script, pods.second.decode.script = generates(3), generates()
    pods.resume = ResumeLimits(max_moves=0)
    _, body = await pods.ask(RequestKind.COMPLETIONS)
    assert "no further engine" in events(body)[-1]["error"]["message"]


async def dies_at_once(turn: Turn) -> None:
    turn.die()


async def answers_with_an_error(turn: Turn) -> None:
    turn.answer(500, b'{"error":{"message":"the core died"}}')


@pytest.mark.parametrize("fails", [dies_at_once, answers_with_an_error])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [k for k in RequestKind if k is not RequestKind.GENERATE])
async def test_another_pod_begins_what_the_client_has_nothing_of(
    pods: Pods, kind: RequestKind, stream: bool, split: bool, fails: Script
) -> None:
    """A whole answer, and a stream that no other engine could go on with."""
    prefills = [await pods.first.prefill()] if split else []
    text = b'{"choices":[{"text":"whole"}]}'

    async def answers_whole(turn: Turn) -> None:
        turn.answer(200, text)

    pods.first.decode.script = fails
    pods.second.decode.script = sends(answers.Engine("a"), kind) if stream else answers_whole
    more = {"stream": stream, "temperature": 1, "presence_penalty": 1, "input": "think " * 40}
    status, body = await pods.ask(kind, *prefills, **more)
    assert status == 200
    if stream:
        expected = answers.Engine("a").answer(kind, pods.second.decode.requests[0].body)
        assert answers.read([body]) == answers.read(expected)
    else:
        assert body == text
    assert len(pods.second.decode.requests) == 1


async def test_an_answer_that_only_its_engine_may_give_is_not_begun_again(pods: Pods) -> None:
    pods.first.decode.script = dies_at_once
    more = {"stream": False, "input": "hi", "background": True}
    status, _ = await pods.ask(RequestKind.RESPONSES, **more)
    assert status == 502
    assert not pods.second.decode.requests


def sends(engine: answers.Engine, kind: RequestKind, after: int | None = None) -> Script:
    """The engine's answer, which breaks off after so many events."""

    async def script(turn: Turn) -> None:
        turn.stream()
        for event in engine.answer(kind, turn.request.body)[:after]:
            turn.chunk(event)
        if after is not None:
            await turn.writer.drain()
            turn.die()
        else:
            turn.end()

    return script


async def test_two_pods_that_fail_end_the_stream_with_an_error(pods: Pods) -> None:
    pods.first.decode.script = generates(3)
    pods.second.decode.script = generates(2, id="cmpl-of-another")
    status, body = await pods.ask(RequestKind.COMPLETIONS)
    *tokens, error = events(body)
    assert status == 200
    assert "decode failed" in error["error"]["message"]
    assert "no further engine" in error["error"]["message"]
    assert tokens


async def test_the_record_has_the_move(pods: Pods) -> None:
    pods.first.decode.script, pods.second.decode.script = generates(4), generates()
    await pods.ask(RequestKind.COMPLETIONS)
    async with pods.first.http.get(pods.first.admin(f"/requests/{ID}")) as answer:
        [record] = msgspec.json.decode(await answer.read(), type=list[SidecarTrace])
    [move] = record.moves
    assert (move.cause, move.method, move.result) == ("crash", "continued", "done")
    assert (move.source, move.target) == ("decode-0", "decode-1")
    # The fourth token has no text yet, and is held back.
    assert (move.delivered, move.seam, move.recomputed) == (3, 3, len(PROMPT) + 3)
    assert move.gap is not None
    recomputed = 'tandem_sidecar_stream_recomputed_tokens_total{method="continued"}'
    assert await pods.first.metric(recomputed) == move.recomputed


async def test_a_pod_that_is_gone_ends_the_stream_with_an_error(pods: Pods) -> None:
    pods.first.decode.script = generates(3)
    await pods.second.stop()
    _, body = await pods.ask(RequestKind.CHAT)
    assert "decode failed" in events(body)[-1]["error"]["message"]


async def test_a_client_cannot_give_a_chat_its_prompt(pods: Pods) -> None:
    """Only a sidecar can, whose plan says so."""
    pods.first.decode.script = generates(end=dies)
    body = asked(is_chat=True, kv_transfer_params={"prompt_token_ids": [1, 2]})
    url = pods.first.url(PATHS[RequestKind.CHAT])
    async with pods.first.http.post(url, json=body, headers=pods.plan()) as response:
        await response.read()
    assert "kv_transfer_params" not in pods.first.decode.requests[-1].json


@pytest.mark.parametrize("has_keys", [False, True])
async def test_a_pod_that_does_not_trust_the_plan_serves_no_rest(
    harness: Harness, tmp_path: Path, has_keys: bool
) -> None:
    """It would begin the chat anew, and the client get its first tokens twice."""
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "k").write_text("fedcba9876543210")
    others = PlanKeys(tmp_path / "second" if has_keys else None)
    async with two_pods(harness, tmp_path / "first", resume=True, keys_of_second=others) as pods:
        pods.first.decode.script, pods.second.decode.script = generates(3), generates()
        _, body = await pods.ask(RequestKind.CHAT)
        assert "answered with an error (503)" in events(body)[-1]["error"]["message"]
        assert not pods.second.decode.requests


async def test_an_engine_that_did_not_read_the_ids_ends_the_stream(pods: Pods) -> None:
    async def reads_the_messages(turn: Turn) -> None:
        body = {k: v for k, v in turn.request.json.items() if k != "kv_transfer_params"}
        turn.request = replace(turn.request, body=json.dumps(body).encode())
        await generates()(turn)

    pods.first.decode.script, pods.second.decode.script = generates(3), reads_the_messages
    _, body = await pods.ask(RequestKind.CHAT)
    assert "did not read the ids" in events(body)[-1]["error"]["message"]


async def test_the_rest_has_a_plan_of_the_keys_in_force(pods: Pods) -> None:
    """A stream may last longer than a key."""

    def rotates_keys_and_dies(turn: Turn, last: bytes) -> None:
        pods.keys.current = {"l": b"fedcba9876543210"}
        dies(turn, last)

    pods.first.decode.script = pods.second.decode.script = generates()
    _, whole = await pods.ask(RequestKind.CHAT)
    pods.first.decode.script = generates(3, rotates_keys_and_dies)
    _, body = await pods.ask(RequestKind.CHAT)
    assert without_head(events(body)) == without_head(events(whole))


@pytest.mark.parametrize("split", [False, True])
async def test_a_stream_that_lacks_only_its_end_needs_no_other_pod(pods: Pods, split: bool) -> None:
    prefills = [await pods.first.prefill()] if split else []
    pods.first.decode.script, pods.second.decode.script = generates(TOKENS, dies), generates()
    more = {"temperature": 0, "presence_penalty": 1, "stream_options": None}
    _, body = await pods.ask(RequestKind.CHAT, *prefills, **more)
    assert body.endswith(DONE)
    assert not pods.second.decode.requests


@pytest.mark.parametrize("split", [False, True])
async def test_a_prompt_that_may_hang_engines_hangs_one_only(
    harness: Harness, tmp_path: Path, split: bool
) -> None:
    prefills = [await harness.prefill()] if split else []
    async with two_pods(harness, tmp_path, resume=True, silence_timeout=0.2) as pods:
        pods.first.decode.script = generates(3, pause=until_gone)
        pods.first.decode.health = hangs
        pods.second.decode.script = generates()
        messages = [{"role": "user", "content": "x" * (EXHAUSTING + 1)}]
        data = BytesIO(json.dumps(asked(is_chat=True, messages=messages)).encode())
        url, plan = pods.first.url(PATHS[RequestKind.CHAT]), pods.plan(*prefills)
        async with pods.first.http.post(url, data=data, headers=plan) as response:
            body = await response.read()
        assert "no sign of life" in events(body)[-1]["error"]["message"]
        assert not pods.second.decode.requests
