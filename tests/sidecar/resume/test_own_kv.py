"""A stream that moves because its pod drains takes its KV from that pod's engine."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme

from tandem_contract import headers
from tandem_contract.paths import RoutingPath
from tandem_contract.plan import Plan, Target, mac_of, prove_prefill, sign
from tandem_contract.plan_keys import PlanKeys
from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_contract.server_tls import mutual_client
from tandem_sidecar.handoff.outbound import new_attempt_id
from tandem_sidecar.security.credentials import ListenTls
from tandem_sidecar.settings import Policy

from ..conftest import Harness
from ..peers import PARAMS, FakePrefill, Script, Turn, hangs, is_prefill
from ..processes import drain
from .scripted import PROMPT, asked, dies, events, generates, prompt_of, until_gone, without_head
from .test_alternates import ID, Pods, pods, two_pods
from .test_drain import Turns, legs, pauses

__all__ = ["pods"]
COMPLETIONS, CHAT = RequestKind.COMPLETIONS, RequestKind.CHAT
AFTER = 5


@asynccontextmanager
async def streaming(
    pods: Pods, kind: RequestKind, *prefills: FakePrefill
) -> AsyncIterator[Callable[[], Awaitable[bytes]]]:
    """A stream of the first pod of which the client has tokens; yields what reads all of it."""
    url, body = pods.first.url(PATHS[kind]), asked(is_chat=kind is CHAT)
    async with pods.first.http.post(url, json=body, headers=pods.plan(*prefills)) as response:
        begin = b"".join([await response.content.readuntil(b"\n\n") for _ in range(2)])

        async def rest() -> bytes:
            return begin + await response.read()

        yield rest


async def drained(pods: Pods, kind: RequestKind, *prefills: FakePrefill) -> bytes:
    """The body of a stream whose first pod drains meanwhile."""
    async with streaming(pods, kind, *prefills) as rest:
        pods.first.sidecar.lifecycle.drain()
        return await rest()


async def whole_of(pods: Pods, kind: RequestKind, prefill: FakePrefill) -> list[object]:
    pods.first.decode.generate = generates()
    _, whole = await pods.ask(kind, prefill)
    pods.first.decode.requests.clear()
    prefill.requests.clear()
    return without_head(events(whole))


@pytest.mark.parametrize("kind", [COMPLETIONS, CHAT])
async def test_the_engine_that_drains_hands_off_what_it_has(pods: Pods, kind: RequestKind) -> None:
    prefill = await pods.first.prefill()
    whole = await whole_of(pods, kind, prefill)
    scripts = Turns(pauses(AFTER))
    first, second = pods.first.decode, pods.second.decode
    first.generate, second.generate = scripts, generates(id="cmpl-of-another")
    body = await drained(pods, kind, prefill)
    assert without_head(events(body)) == whole
    # Only the first engine's own prompt was prefilled there.
    assert len(prefill.requests) == 1
    [leg], [rest] = legs(first), second.requests
    ids = prompt_of(leg.json)
    assert ids[: len(PROMPT)] == PROMPT
    assert 0 < len(ids) - len(PROMPT) <= AFTER
    assert leg.json["max_tokens"] == 1
    assert not leg.json.get("stream")
    assert rest.json["kv_transfer_params"]["remote_engine_id"] == "engine-p"
    assert leg.headers["x-request-id"] == rest.headers["x-request-id"]
    await asyncio.wait_for(scripts.turns[0].gone.wait(), 10)
    for pod in (pods.first, pods.second):
        assert await pod.metric("disaggregated_errors_total") == 0


async def refuses(turn: Turn) -> None:
    turn.answer(503, b"shutting down")


async def dies_at_once(turn: Turn) -> None:
    turn.die()


async def names_no_blocks(turn: Turn) -> None:
    """As vLLM's answer to a prompt that was preempted before it had ended."""
    params = json.loads(PARAMS) | {"remote_block_ids": [[]]}
    turn.answer(200, json.dumps({"choices": [], "kv_transfer_params": params}).encode())


async def has_no_hand_offs(turn: Turn) -> None:
    turn.answer(200, b'{"choices": []}')


async def rejects(turn: Turn) -> None:
    turn.answer(422, b"no such parameter")


FAILS = [refuses, dies_at_once, names_no_blocks, has_no_hand_offs, rejects, hangs]


@pytest.fixture
async def strict_pods(harness: Harness, tmp_path: Path) -> AsyncIterator[Pods]:
    """One attempt for each prefill, and no fallback."""
    changes: dict[str, Any] = {"retries": 0, "policy": Policy(False), "prefill_timeout": 4.0}
    async with two_pods(harness, tmp_path, resume=True, **changes) as running:
        yield running


@pytest.mark.parametrize("fails", FAILS)
@pytest.mark.parametrize("kind", [COMPLETIONS, CHAT])
async def test_a_hand_off_that_fails_loses_nothing(
    strict_pods: Pods, kind: RequestKind, fails: Script
) -> None:
    """The prefill pod computes it, whatever the reason, and in time."""
    pods = strict_pods
    prefill = await pods.first.prefill()
    whole = await whole_of(pods, kind, prefill)

    async def first(turn: Turn) -> None:
        await (fails if is_prefill(turn.request) else generates(AFTER, pause=until_gone))(turn)

    pods.first.decode.generate = first
    pods.second.decode.generate = generates(id="cmpl-of-another")
    body = await drained(pods, kind, prefill)
    assert without_head(events(body)) == whole
    # Twice where the connection was one of the pool, and may have been stale.
    assert legs(pods.first.decode)
    assert len(pods.second.decode.requests) == 1
    assert len(prefill.requests) == 2


async def test_a_drain_keeps_the_engine_until_the_kv_was_read(pods: Pods) -> None:
    prefill, going = await pods.first.prefill(), asyncio.Event()

    async def waits(turn: Turn) -> None:
        await going.wait()
        await generates()(turn)

    pods.first.decode.generate, pods.second.decode.generate = pauses(AFTER), waits
    async with streaming(pods, COMPLETIONS, prefill) as rest:
        waiting = asyncio.create_task(drain(pods.first.sidecar.admin, wait=True))
        await pods.second.decode.received(1)
        assert len(legs(pods.first.decode)) == 1
        assert not waiting.done()
        going.set()
        await asyncio.wait_for(waiting, 10)
        await rest()


async def test_a_client_that_leaves_meanwhile_ends_the_hand_off(pods: Pods) -> None:
    prefill, turns = await pods.first.prefill(), list[Turn]()

    async def first(turn: Turn) -> None:
        turns.append(turn)
        await (hangs if is_prefill(turn.request) else pauses(AFTER))(turn)

    pods.first.decode.generate = first
    async with streaming(pods, COMPLETIONS, prefill):
        pods.first.sidecar.lifecycle.drain()
        await pods.first.decode.received(2)
    for turn in turns:
        await asyncio.wait_for(turn.gone.wait(), 10)
    for pod in (pods.first, pods.second):
        await asyncio.wait_for(pod.sidecar.lifecycle.idle(), 10)


async def test_after_a_failure_the_prefill_pod_is_asked(pods: Pods) -> None:
    """The pod's engine is gone."""
    prefill = await pods.first.prefill()
    whole = await whole_of(pods, COMPLETIONS, prefill)
    pods.first.decode.generate = generates(AFTER, dies)
    pods.second.decode.generate = generates(id="cmpl-of-another")
    _, body = await pods.ask(COMPLETIONS, prefill)
    assert without_head(events(body)) == whole
    assert not legs(pods.first.decode)
    assert len(prefill.requests) == 2


async def test_a_prompt_that_was_not_split_is_computed(pods: Pods) -> None:
    """A hand-off was not worth it, or the pods cannot read each other's KV."""
    pods.first.decode.generate = pauses(AFTER)
    pods.second.decode.generate = generates()
    await drained(pods, COMPLETIONS)
    assert not legs(pods.first.decode)
    assert len(pods.second.decode.requests) == 1


async def test_a_request_without_a_token_is_prefilled_again(pods: Pods) -> None:
    """The engine may not have computed its prompt."""
    prefill = await pods.first.prefill()
    pods.first.decode.generate, pods.second.decode.generate = pauses(0), generates()
    asking = asyncio.create_task(pods.ask(COMPLETIONS, prefill))
    await pods.first.decode.received(1)
    pods.first.sidecar.lifecycle.drain()
    await asking
    assert not legs(pods.first.decode)
    assert len(prefill.requests) == 2


async def test_once_the_drains_limit_has_passed_no_leg_is_taken(pods: Pods) -> None:
    """Nothing would end it."""
    lifecycle = pods.first.sidecar.lifecycle
    lifecycle.timeout = 0
    lifecycle.drain()
    async with asyncio.timeout(10):
        while not lifecycle.has_expired:
            await asyncio.sleep(0)
    target = Target("decode-0", str(pods.first.sidecar.listen), asks_for_proof=True)
    proof = prove_prefill(target, "a", pods.keys.current, now=time.time(), seconds=60)
    url, body = pods.first.url(PATHS[COMPLETIONS]), asked(stream=False, stream_options=None)
    names = {headers.PREFILL_PROOF: proof, headers.REQUEST_ID: "a"}
    async with pods.first.http.post(url, json=body, headers=names) as response:
        assert response.status == 503
    assert not pods.first.decode.requests


async def ask_leg(pods: Pods, plan: str = "") -> int:
    """Ask the first pod for the leg that reads the KV of the stream `ID`, which leaves it if it has
    this `plan`; the status."""
    target, attempt = Target("decode-0", str(pods.first.sidecar.listen)), new_attempt_id(ID)
    keys, now = pods.keys.current, time.time()
    proof = prove_prefill(target, attempt, keys, now=now, seconds=60, left_plan=plan)
    body = asked(stream=False, stream_options=None)
    body["kv_transfer_params"] = {"do_remote_decode": True}
    names = {headers.PREFILL_PROOF: proof, headers.REQUEST_ID: attempt}
    url = pods.first.url(PATHS[COMPLETIONS])
    async with pods.first.http.post(url, json=body, headers=names) as response:
        await response.read()
        return response.status


@asynccontextmanager
async def kept_by_a_router(pods: Pods, *prefills: FakePrefill) -> AsyncIterator[str]:
    """A stream of the first pod's engine that only a router can move; the MAC of its plan."""
    now = time.time()
    plan = Plan(
        RoutingPath.PREFILL_THEN_DECODE if prefills else RoutingPath.UNIFIED,
        "unit",
        Target("decode-0", str(pods.first.sidecar.listen)),
        tuple(Target("prefill-0", str(each.address)) for each in prefills),
        request_id=ID,
        expires=now + 60,
        alternates=(),
    )
    signed = sign(plan, pods.keys.current, now=now)
    names = {headers.PLAN: signed, headers.REQUEST_ID: ID}
    url = pods.first.url(PATHS[COMPLETIONS])
    async with pods.first.http.post(url, json=asked(), headers=names) as response:
        await response.content.readuntil(b"\n\n")
        yield mac_of(signed)


@pytest.mark.parametrize("split", [False, True])
async def test_an_engine_without_room_takes_the_leg_of_its_own_stream(
    pods: Pods, split: bool
) -> None:
    """The stream ends there first; until its router leaves, the drain still waits for it."""
    prefills = [await pods.first.prefill()] if split else []
    turns = list[Turn]()

    async def has_room_for_one(turn: Turn) -> None:
        turns.append(turn)
        if is_prefill(turn.request):
            await asyncio.wait_for(turns[0].gone.wait(), 10)
        await pauses(AFTER)(turn)

    pods.first.decode.generate = has_room_for_one
    lifecycle = pods.first.sidecar.lifecycle
    async with kept_by_a_router(pods, *prefills) as plan:
        assert await ask_leg(pods, plan) == 200
        [work] = lifecycle.work
        assert work.describe()["request_id"] == ID
        idle = asyncio.create_task(lifecycle.engines_idle())
        assert await ask_leg(pods, plan) == 200
        assert not idle.done()
    await asyncio.wait_for(idle, 10)


async def test_a_freed_engine_keeps_no_drain_past_its_limit(pods: Pods) -> None:
    prefill, lifecycle = await pods.first.prefill(), pods.first.sidecar.lifecycle
    pods.first.decode.generate = pauses(AFTER)
    for prefills in ([], [prefill]):
        async with kept_by_a_router(pods, *prefills) as plan:
            assert await ask_leg(pods, plan) == 200
            [work] = lifecycle.work
            work.drain_expired()
            assert not lifecycle.work


async def test_no_other_leg_ends_a_stream(pods: Pods) -> None:
    """Clients choose their ids: another's may be the same."""
    turns = list[Turn]()

    async def first(turn: Turn) -> None:
        turns.append(turn)
        await pauses(AFTER)(turn)

    pods.first.decode.generate = first
    async with kept_by_a_router(pods):
        assert await ask_leg(pods) == 200
        assert not turns[0].gone.is_set()
        async with kept_by_a_router(pods) as plan:
            assert await ask_leg(pods, plan) == 200
            await asyncio.wait_for(turns[2].gone.wait(), 10)
            assert not turns[0].gone.is_set()


async def test_behind_mutual_tls_the_pod_that_drains_is_not_asked(
    harness: Harness, tmp_path: Path
) -> None:
    """Its sidecar would want a certificate, which sidecars have not."""
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "k").write_text("0123456789abcdef")
    authority = trustme.CA()
    issued = authority.issue_cert("chat.default.svc")
    authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    issued.private_key_pem.write_to_path(str(tmp_path / "tls.key"))
    for part in issued.cert_chain_pems:
        part.write_to_path(str(tmp_path / "tls.crt"), append=True)
    keys, left = PlanKeys(tmp_path / "keys"), await harness.prefill()
    prefill = await harness.prefill()
    await harness.start(keys=keys, listen_tls=ListenTls(tmp_path, is_mutual=True))
    now = time.time()
    plan = Plan(
        RoutingPath.PREFILL_THEN_DECODE,
        "unit",
        Target("decode-0", str(harness.sidecar.listen)),
        (Target("prefill-0", str(prefill.address)),),
        request_id=ID,
        expires=now + 60,
        alternates=(),
        left=Target("decode-1", str(left.address), asks_for_proof=True),
    )
    names = {headers.PLAN: sign(plan, keys.current, now=now), headers.REQUEST_ID: ID}
    harness.decode.generate = generates()
    url = harness.url(PATHS[COMPLETIONS]).replace("http:", "https:")
    tls = mutual_client(tmp_path)
    async with harness.http.post(url, json=asked(), headers=names, ssl=tls) as response:
        assert response.status == 200
        await response.read()
    assert not left.requests
    assert len(prefill.requests) == 1
