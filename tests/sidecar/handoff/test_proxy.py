"""Which requests are refused, passed through or handed off."""

import asyncio
import json
import re
import time
from pathlib import Path

import pytest

from tandem_contract.headers import PREFILL_PROOF
from tandem_contract.paths import RoutingPath
from tandem_contract.plan import Plan, Target, Timeouts, prove_prefill, sign
from tandem_contract.plan_keys import PlanKeys
from tandem_sidecar.security.route import AllowList
from tandem_sidecar.settings import Settings

from ..conftest import Harness
from ..peers import Turn
from ..wire import wire
from .test_transfer_monitor import page, waits_for_kv

BODY = b'{"prompt": "Hi"}'
PATH = "X-Continuum-Routing-Path"


def signed(harness: Harness, keys: PlanKeys, **changes: object) -> dict[str, str]:
    values: dict[str, object] = {
        "path": RoutingPath.PREFILL_THEN_DECODE,
        "reason": "long_prompt",
        "decode": Target("decode-7", "127.0.0.1:1"),
        "prefill": tuple(
            Target(f"prefill-{i}", str(p.address)) for i, p in enumerate(harness.prefills)
        ),
        "request_id": "r1",
        "expires": time.time() + 60,
    }
    plan = Plan(**(values | changes))  # type: ignore[arg-type]  # a table of its fields
    return {"x-tandem-plan": sign(plan, keys.current, now=time.time()), "x-request-id": "r1"}


@pytest.fixture
def keys(tmp_path: Path) -> PlanKeys:
    (tmp_path / "k1").write_bytes(b"0123456789abcdef")
    return PlanKeys(tmp_path)


async def test_a_plan_names_the_backends(harness: Harness, keys: PlanKeys) -> None:
    await harness.prefill()
    await harness.start(keys=keys, pod_name="")
    async with harness.http.post(harness.url(), data=BODY, headers=signed(harness, keys)) as answer:
        assert answer.headers[PATH] == "prefill_then_decode"
        assert answer.headers["X-Continuum-Prefill-Backend"] == "prefill-0"
        assert answer.headers["X-Continuum-Decode-Backend"] == "decode-7"
        assert answer.headers["x-request-id"] == "r1"
    assert "x-tandem-plan" not in harness.decode.requests[0].headers
    assert "x-tandem-plan" not in harness.prefills[0].requests[0].headers
    name = 'disaggregated_prefill_duration_seconds_count{backend="prefill-0"}'
    assert await harness.metric(name) == 1


async def test_both_engines_get_the_priority(harness: Harness, keys: PlanKeys) -> None:
    await harness.prefill()
    await harness.start(keys=keys, pod_name="")
    body, headers = b'{"priority": 1, "prompt": "Hi","priority":-7}', signed(harness, keys)
    async with harness.http.post(harness.url(), data=body, headers=headers) as answer:
        assert answer.headers[PATH] == "prefill_then_decode"
    for engine in (harness.prefills[0], harness.decode):
        # What counts is the last of a repeated name.
        assert json.loads(engine.requests[0].body)["priority"] == -7


async def silent(turn: Turn) -> None:
    await turn.gone.wait()


async def test_without_timeouts_in_the_plan_the_sidecars_own_hold(
    harness: Harness, keys: PlanKeys
) -> None:
    # The defaults of the router's configuration, too.
    assert (Settings().prefill_timeout, Settings().kv_transfer_timeout) == (30.0, 10.0)
    await harness.prefill(silent)
    await harness.start(keys=keys, prefill_timeout=0.2)
    async with harness.http.post(harness.url(), data=BODY, headers=signed(harness, keys)) as answer:
        assert (answer.status, answer.headers[PATH]) == (200, "fallback")


async def test_the_prefill_timeout_of_a_plan_holds_instead_of_the_flag(
    harness: Harness, keys: PlanKeys
) -> None:
    await harness.prefill(silent)
    # With the flag's hour, this test would not end.
    await harness.start(keys=keys, prefill_timeout=3600.0)
    headers = signed(harness, keys, timeouts=Timeouts(prefill=0.2))
    async with harness.http.post(harness.url(), data=BODY, headers=headers) as answer:
        assert (answer.status, answer.headers[PATH]) == (200, "fallback")


async def test_a_longer_prefill_timeout_of_a_plan_holds_too(
    harness: Harness, keys: PlanKeys
) -> None:
    await harness.prefill()
    # With the flag's value, no prefill would be sent in time.
    await harness.start(keys=keys, prefill_timeout=0.0)
    headers = signed(harness, keys, timeouts=Timeouts(prefill=3600.0))
    async with harness.http.post(harness.url(), data=BODY, headers=headers) as answer:
        assert (answer.status, answer.headers[PATH]) == (200, "prefill_then_decode")


async def test_the_transfer_timeout_of_a_plan_holds_instead_of_the_flag(
    harness: Harness, keys: PlanKeys
) -> None:
    async def metrics_page(turn: Turn) -> None:
        turn.answer(200, page(1))

    await harness.prefill()
    await harness.start(waits_for_kv, keys=keys, kv_transfer_timeout=3600.0)
    harness.decode.metrics = metrics_page
    headers = signed(harness, keys, timeouts=Timeouts(kv_transfer=0.1))
    async with harness.http.post(harness.url(), data=BODY, headers=headers) as answer:
        assert (answer.headers[PATH], await answer.read()) == ("fallback", b'{"mine": true}')


@pytest.mark.parametrize(
    ("path", "ranks"),
    [(RoutingPath.PREFILL_THEN_DECODE, ["0", "1"]), (RoutingPath.UNIFIED, ["1"])],
)
async def test_each_leg_goes_to_the_rank_that_the_plan_names(
    harness: Harness, keys: PlanKeys, path: RoutingPath, ranks: list[str]
) -> None:
    prefill = await harness.prefill()
    await harness.start(keys=keys)
    headers = signed(
        harness,
        keys,
        path=path,
        decode=Target("d", "127.0.0.1:1", 1),
        prefill=(Target("p", str(prefill.address), 0),),
    )
    headers["x-data-parallel-rank"] = "7"
    async with harness.http.post(harness.url(), data=BODY, headers=headers) as answer:
        assert answer.headers[PATH] == path.value
    received = [request.headers for request in (*prefill.requests, *harness.decode.requests)]
    assert [headers.get("x-data-parallel-rank") for headers in received] == ranks


@pytest.mark.parametrize(
    "path", [RoutingPath.FAST_DECODE, RoutingPath.UNIFIED, RoutingPath.FALLBACK]
)
async def test_a_plan_without_a_split_is_followed(
    harness: Harness, keys: PlanKeys, path: RoutingPath
) -> None:
    await harness.prefill()
    await harness.start(keys=keys)
    headers = signed(harness, keys, path=path, reason="short_prompt")
    async with harness.http.post(harness.url(), data=BODY, headers=headers) as answer:
        assert answer.headers[PATH] == path.value
    assert harness.prefills[0].requests == []
    unified = await harness.metric('tandem_sidecar_unified_total{reason="short_prompt"}')
    assert unified == (path is RoutingPath.UNIFIED)
    assert await harness.metric("disaggregated_fallback_total") == (path is RoutingPath.FALLBACK)


async def test_a_bad_plan_is_served_unified_and_counted(harness: Harness, keys: PlanKeys) -> None:
    await harness.prefill()
    await harness.start(keys=keys)
    headers = signed(harness, keys) | harness.candidates | {"x-request-id": "another"}
    async with harness.http.post(harness.url(), data=BODY, headers=headers) as answer:
        assert answer.headers[PATH] == "unified"
    assert harness.prefills[0].requests == []
    assert await harness.metric('disaggregated_errors_total{phase="orchestration"}') == 1


async def test_a_candidate_outside_the_allow_list_is_ignored_and_counted(harness: Harness) -> None:
    inside, outside = await harness.prefill(), await harness.prefill()
    await harness.start(allow=AllowList(addresses=frozenset({inside.address})))
    candidates = {"x-prefiller-host-port": f"{outside.address},{inside.address}"}
    async with harness.http.post(harness.url(), data=BODY, headers=candidates) as answer:
        assert answer.headers["X-Continuum-Prefill-Backend"] == str(inside.address)
    assert outside.requests == []
    assert await harness.metric("tandem_sidecar_ignored_candidates_total") == 1


async def test_a_single_engine_rule_overrides_a_planned_split(harness: Harness) -> None:
    await harness.prefill()
    await harness.start()
    body = b'{"prompt": "Hi", "n": 2}'
    async with harness.http.post(harness.url(), data=body, headers=harness.candidates) as answer:
        assert answer.headers[PATH] == "unified"
    assert harness.decode.requests[0].body == body
    assert harness.prefills[0].requests == []
    assert await harness.metric('tandem_sidecar_unified_total{reason="n"}') == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize(
    "body",
    [
        b'{"kv_transfer_params": {"do_remote_prefill": true}, "big": 9007199254740993}',
        b'{"big": 9007199254740993, "kv_transfer\\u005fparams": 1, "kv_transfer_params": 2}',
    ],
)
async def test_forbidden_fields_never_reach_an_engine(
    harness: Harness, path: str, body: bytes
) -> None:
    await harness.prefill()
    await harness.start()
    headers = {"x-data-parallel-rank": "1", "x-encoder-hosts-ports": "evil:1"}
    async with harness.http.post(harness.url(path), data=body, headers=headers) as answer:
        assert answer.status == 200
    [request] = harness.decode.requests
    # A responses request gets an id of the sidecar's own.
    sent = re.sub(rb',"request_id":"resp_[0-9a-f]{44}"', b"", request.body)
    assert sent == b'{"big":9007199254740993}'
    assert not set(headers) & set(request.headers)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"a": NaN}', b"{"])
async def test_a_body_that_is_no_json_object_is_a_400(harness: Harness, body: bytes) -> None:
    await harness.start()
    async with harness.http.post(harness.url(), data=body) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["type"] == "BadRequestError"
        assert answer.headers[PATH] == "unified"
    assert harness.decode.requests == []


async def test_other_requests_pass_through_unchanged(harness: Harness) -> None:
    async def script(turn: Turn) -> None:
        turn.answer(418, b"raw \xff body", "x-mine: 1", "set-cookie: a=1", "set-cookie: b=2")

    await harness.start(script)
    async with wire(harness.sidecar.listen) as client:
        body = b'{ "input" : 9007199254740993 }'
        client.post(body, "x-custom: v", path="/v1/embeddings?a=%20b&c")
        answer = await client.response()
    assert (answer.status, answer.body) == (418, b"raw \xff body")
    assert answer.headers["x-mine"] == "1"
    assert "x-continuum-routing-path" not in answer.headers
    [request] = harness.decode.requests
    assert (request.method, request.target, request.body) == (
        "POST",
        "/v1/embeddings?a=%20b&c",
        body,
    )
    assert request.headers["x-custom"] == "v"


async def test_passthrough_to_a_dead_engine_is_a_502(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    await harness.start()
    harness.decode.close_port()
    async with harness.http.get(harness.url("/v1/models")) as answer:
        assert answer.status == 502
    assert not caplog.records, "requests that come many times a second are not logged"
    url, headers = harness.url("/v1/embeddings"), {"x-request-id": "mine"}
    async with harness.http.post(url, data=b"{}", headers=headers) as answer:
        assert answer.status == 502
    [record] = caplog.records
    assert record.getMessage().startswith("passthrough of POST failed: ")
    assert vars(record)["request_id"] == "mine"


async def test_a_client_leaving_a_passthrough_aborts_it(harness: Harness) -> None:
    disconnect = asyncio.Event()

    async def script(turn: Turn) -> None:
        await turn.gone.wait()
        disconnect.set()

    await harness.start(script)
    async with wire(harness.sidecar.listen) as client:
        client.post(b"{}", path="/v1/responses")
        await harness.decode.received(1)
        client.writer.transport.abort()
        await asyncio.wait_for(disconnect.wait(), 10)
    await asyncio.wait_for(harness.sidecar.lifecycle.idle(), 10)


async def test_an_unusable_request_id_is_replaced(harness: Harness) -> None:
    await harness.start()
    async with harness.http.post(
        harness.url(), data=BODY, headers={"x-request-id": "x" * 200}
    ) as answer:
        assert len(answer.headers["x-request-id"]) == 32


async def test_a_proven_prefill_leg_ends_with_the_sidecar_that_sent_it(
    harness: Harness, keys: PlanKeys
) -> None:
    gone = asyncio.Event()

    async def computes(turn: Turn) -> None:
        await turn.gone.wait()
        gone.set()

    await harness.start(computes, keys=keys)
    target = Target("decode-0", str(harness.sidecar.listen))
    proof = prove_prefill(target, "r-1", keys.current, now=time.time(), seconds=60.0)
    async with wire(harness.sidecar.listen) as client:
        client.post(BODY, "x-request-id: r-1", f"{PREFILL_PROOF}: {proof}")
        await harness.decode.received(1)
    await asyncio.wait_for(gone.wait(), 10)
