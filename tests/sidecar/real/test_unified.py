"""A unified pod takes part in hand-offs: its sidecar lets proven prefill legs pass."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem_contract import headers, metrics
from tandem_contract.paths import RoutingPath
from tandem_contract.plan import Plan, Target, load_keys, sign
from tandem_loadtest.calls import Call
from tandem_loadtest.client.openai import parse_answer

from .client import members_of
from .engine import Engine
from .pair import FALLBACK, SPLIT, Pair, call, expected_tokens, start_pair

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]

UNIFIED = RoutingPath.UNIFIED


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    (tmp_path / "k1").write_bytes(b"0123456789abcdef")
    return tmp_path


@asynccontextmanager
async def two_pods(decode: Engine, unified: Engine, keys: Path) -> AsyncIterator[tuple[Pair, Pair]]:
    """A decode pod and a unified pod, each an engine behind its sidecar with `keys`."""
    flag = ("--plan-key-dir", str(keys))
    async with (
        start_pair(decode, *flag) as first,
        start_pair(unified, *flag, "--pod-name", "unified-0") as second,
    ):
        yield first, second


async def split(
    decode: Pair, prefill: Target, keys: Path, request: Call, request_id: str
) -> tuple[RoutingPath, list[int]]:
    """Send `request` to the pod `decode` with a plan that has `prefill` compute the prompt."""
    now = time.time()
    plan = Plan(
        SPLIT,
        "worth_it",
        Target("decode-0", str(decode.sidecar.listen)),
        (prefill,),
        request_id=request_id,
        expires=now + 60,
    )
    signed = {
        headers.PLAN: sign(plan, load_keys(keys), now=now),
        headers.REQUEST_ID: request_id,
    }
    answer, path = await post(decode, request, signed)
    return RoutingPath(path), list(parse_answer(answer).token_ids or ())


async def post(
    pod: Pair, request: Call, added: dict[str, str], **members: Any
) -> tuple[bytes, str]:
    """The answer to `request` with further headers and members, and its routing path."""
    body = members_of(request) | members
    async with pod.http.post(pod.sidecar.url(), json=body, headers=added) as response:
        assert response.status == 200
        return await response.read(), response.headers.get(headers.ROUTING_PATH, "")


def as_target(pod: Pair, *, asks_for_proof: bool = True, name: str = "unified-0") -> Target:
    return Target(name, str(pod.sidecar.listen), None, asks_for_proof)


async def test_a_unified_pod_prefills_for_a_decode_pod(
    decode: Engine, unified: Engine, keys: Path
) -> None:
    async with two_pods(decode, unified, keys) as (pod, other):
        for seed in (40, 41):
            request = call(seed)
            result = await split(pod, as_target(other), keys, request, f"r{seed}")
            assert result == (SPLIT, expected_tokens(request))
        assert await pod.errors() == await other.errors() == {}
        assert await pod.finished_on(SPLIT) == 2
        # The sidecar of the decode pod has counted the requests.
        assert await other.finished_on(UNIFIED) == 0
        assert await pod.decode.figure(f"{metrics.ENGINE_XFER_BYTES}_sum") > 0
        await pod.wait_until_idle(decode, unified)
        await other.wait_until_idle()


async def test_unified_pods_prefill_for_each_other(
    unified: Engine, second_unified: Engine, keys: Path
) -> None:
    async with two_pods(second_unified, unified, keys) as (pod, other):
        for seed, (decoding, prefilling) in ((46, (pod, other)), (47, (other, pod))):
            request = call(seed)
            # A pod checks that the proof was made for it: by its address, as it has no name here.
            target = as_target(prefilling, name=str(prefilling.sidecar.listen))
            result = await split(decoding, target, keys, request, f"r{seed}")
            assert result == (SPLIT, expected_tokens(request))
            assert await decoding.finished_on(SPLIT) == 1
            assert await decoding.decode.figure(f"{metrics.ENGINE_XFER_BYTES}_sum") > 0
        assert await pod.errors() == await other.errors() == {}
        await pod.wait_until_idle(unified, second_unified)
        await other.wait_until_idle()


async def test_a_prefill_pod_prefills_for_a_unified_pod(
    prefill: Engine, unified: Engine, keys: Path
) -> None:
    async with start_pair(unified, "--plan-key-dir", str(keys)) as pod:
        request = call(42)
        target = Target("prefill-0", str(prefill.address))
        assert await split(pod, target, keys, request, "r42") == (SPLIT, expected_tokens(request))
        await pod.wait_until_idle(prefill, unified)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"asks_for_proof": False}, id="no proof"),
        pytest.param({"name": "another"}, id="signed for another name"),
    ],
)
async def test_without_its_proof_the_hand_off_falls_back(
    decode: Engine, unified: Engine, keys: Path, change: dict[str, Any]
) -> None:
    async with two_pods(decode, unified, keys) as (pod, other):
        request = call(43 + len(str(change)))
        target = as_target(other, **change)
        if "name" in change:
            # A pod knows itself by its address, too.
            address = target.address.replace("127.0.0.1", "localhost")
            target = Target(target.name, address, asks_for_proof=True)
        result = await split(pod, target, keys, request, "r43")
        assert result == (FALLBACK, expected_tokens(request))
        await pod.wait_until_idle(decode, unified)


async def test_a_client_cannot_make_a_unified_pod_hold_kv(unified: Engine, keys: Path) -> None:
    async with start_pair(unified, "--plan-key-dir", str(keys)) as pod:
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        forged = {headers.PREFILL_PROOF: "v1.k1.e30.AAAA", headers.REQUEST_ID: "r"}
        for added in ({}, forged):
            answer, path = await post(pod, call(44), added, kv_transfer_params=asked)
            assert path == UNIFIED
            assert not json.loads(answer).get("kv_transfer_params")
        await pod.wait_until_idle(unified)


async def test_a_unified_pod_that_dies_costs_no_answer(
    decode: Engine, unified: Engine, keys: Path
) -> None:
    async with two_pods(decode, unified, keys) as (pod, other):
        unified.kill()
        request = call(45)
        result = await split(pod, as_target(other), keys, request, "r45")
        assert result == (FALLBACK, expected_tokens(request))
        assert await pod.errors() == {"prefill": 1}
        await pod.wait_until_idle(decode)
