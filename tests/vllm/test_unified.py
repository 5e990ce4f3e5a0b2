"""A prefill leg that passes the sidecar of its pod, as at a unified pod, between real engines."""

import time
from pathlib import Path

import aiohttp
import pytest

from tandem_contract import headers, metrics
from tandem_contract.paths import RoutingPath
from tandem_contract.plan import Plan, Target, load_keys, sign

from ..sidecar.processes import sidecar
from .api_requests import KINDS, ask
from .pairs import Moved, Pair

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TIMES = ("--silence-timeout", "30s", "--prefill-timeout", "120s")
"""An engine on a busy machine may send nothing for seconds."""


@pytest.mark.parametrize(
    ("asks_for_proof", "path"),
    [(True, RoutingPath.PREFILL_THEN_DECODE), (False, RoutingPath.FALLBACK)],
    ids=["proof", "no-proof"],
)
async def test_a_proven_prefill_leg_passes_the_sidecar_of_its_pod(
    pair: Pair,
    http: aiohttp.ClientSession,
    tmp_path: Path,
    asks_for_proof: bool,
    path: RoutingPath,
) -> None:
    (tmp_path / "k1").write_bytes(b"0123456789abcdef")
    flags = ("--plan-key-dir", str(tmp_path), *TIMES)
    kind = KINDS["chat"]
    body = kind.body(f"{path}: " + "who lives in the lighthouse? " * 20)
    decode_url = f"http://{pair.decode.address}"
    async with (
        sidecar(*flags, "--engine", decode_url, "--pod-name", "decode-0") as decode,
        sidecar(*flags, "--engine", f"http://{pair.prefill.address}", "--pod-name", "u-0") as other,
    ):
        now, target = time.time(), Target("u-0", str(other.listen), None, asks_for_proof)
        plan = Plan(
            RoutingPath.PREFILL_THEN_DECODE,
            "worth_it",
            Target("decode-0", str(decode.listen)),
            (target,),
            request_id=f"r-{path}",
            expires=now + 60,
        )
        routed = {
            headers.PLAN: sign(plan, load_keys(tmp_path), now=now),
            headers.REQUEST_ID: plan.request_id,
        }
        moved = await Moved(http, pair.decode.url("/metrics")).begin()
        handed = await ask(http, decode.url(kind.path), body, routed)
        alone = await pair.alone(http, kind, body)
        assert kind.text(handed) == kind.text(alone) != ""
        assert handed.headers[headers.ROUTING_PATH] == path
        tokens = await moved.by(metrics.ENGINE_PROMPT_BY_SOURCE, source="external_kv_transfer")
        assert (tokens > 100) is asks_for_proof
