"""Backends that fail behind real Envoy: what the EPP learns, and what clients get to see."""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from tandem_contract import headers as wire
from tandem_epp.backends.health import EJECT_IN_A_ROW
from tandem_operator.routing.envoy.clusters import PICKED, Json, fallback_cluster
from tandem_operator.routing.envoy.http_filters import BodyMode

from ..envoy.test_with_envoy import MODES, Stack, post, running
from ..real import Backend, until

pytestmark = pytest.mark.component

CLIENTS = 8


async def figure(stack: Stack, metric: str, backend: str, **labels: str) -> float:
    text = ",".join(f'{k}="{v}"' for k, v in {"backend": backend, **labels}.items())
    return (await stack.epp.figures()).get(f"tandem_epp_{metric}{{{text}}}", 0.0)


async def load_until(stack: Stack, is_over: asyncio.Event, statuses: Counter[int]) -> None:
    """Clients that send one request after the other."""

    async def client(number: int) -> None:
        sent = 0
        while not is_over.is_set():
            prompt = f"client {number} request {sent}"
            statuses[(await post(stack, {"model": "m", "prompt": prompt}))[0]] += 1
            sent += 1

    async with asyncio.TaskGroup() as clients:
        for number in range(CLIENTS):
            clients.create_task(client(number))


@MODES
async def test_a_failing_pod_fails_few_requests_and_returns_once_it_works(
    tmp_path: Path, mode: BodyMode
) -> None:
    # The cost avoids a pod after its first failure, long before it is ejected.
    async with running(tmp_path, mode, plugins=("active-request-scorer",)) as stack:
        bad, good = stack.decode
        bad.fails = True
        statuses: Counter[int] = Counter()
        is_over = asyncio.Event()
        load = asyncio.create_task(load_until(stack, is_over, statuses))

        async def is_ejected() -> bool:
            return bool(await figure(stack, "ejected", bad.name))

        await until(is_ejected)
        before = len(good.received)

        async def good_serves_all() -> bool:
            return len(good.received) > before + 10 * CLIENTS

        await until(good_serves_all)
        failed = statuses[500]
        assert 0 < failed <= CLIENTS + EJECT_IN_A_ROW
        bad.fails = False

        async def serves_again() -> bool:
            return await figure(stack, "ejected", bad.name) == 0

        # The ejection takes 5 s; then one request is the probe.
        await until(serves_again)
        served = len(bad.received)

        async def bad_gets_requests() -> bool:
            return len(bad.received) > served + CLIENTS

        await until(bad_gets_requests)
        is_over.set()
        await load
        assert statuses[500] == failed, "neither the probe nor a later request failed"
        assert set(statuses) == {200, 500}
        assert await figure(stack, "outcomes_total", bad.name, outcome="error") == failed
        assert await figure(stack, "ejections_total", bad.name) == 1


@MODES
async def test_a_request_that_fails_everywhere_ejects_no_pod(
    tmp_path: Path, mode: BodyMode
) -> None:
    """A body that the engines answer with 500, such as one that they fail to decode."""
    async with running(tmp_path, mode) as stack:
        for backend in stack.decode:
            backend.fails = True
        body = {"model": "m", "prompt": "bad", "seed": 9**999}
        assert {(await post(stack, body))[0] for _ in range(14)} == {500}
        assert all(backend.received for backend in stack.decode)
        counted = 0.0
        for backend in stack.decode:
            assert await figure(stack, "ejections_total", backend.name) == 0
            assert await figure(stack, "failure_rate", backend.name) == 0
            counted += await figure(stack, "outcomes_total", backend.name, outcome="error")
        assert counted == 14


@MODES
async def test_envoy_tells_why_it_answered_itself(tmp_path: Path, mode: BodyMode) -> None:
    async with running(tmp_path, mode) as stack:
        async with stack.session.get(stack.url + "/v1/responses/die") as response:
            assert response.status == 503
        (victim,) = [backend for backend in stack.decode if backend.received]
        assert await figure(stack, "outcomes_total", victim.name, outcome="reset") == 1


@MODES
async def test_an_answer_that_breaks_off_counts_although_its_headers_passed(
    tmp_path: Path, mode: BodyMode
) -> None:
    async with running(tmp_path, mode) as stack:
        async with stack.session.get(stack.url + "/v1/models") as complete:
            await complete.read()
        async with stack.session.get(stack.url + "/v1/responses/cut") as response:
            assert await response.content.readexactly(6) == b"first "
            (victim,) = [
                b for b in stack.decode if "/v1/responses/cut" in [r.path for r in b.received]
            ]
            victim.release.set()
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()

        async def is_counted() -> bool:
            return await figure(stack, "outcomes_total", victim.name, outcome="broken") == 1

        await until(is_counted)
        figures = await stack.epp.figures()
        broken = [v for k, v in figures.items() if 'outcome="broken"' in k]
        assert broken == [1], "a complete answer is not broken"


def time_out_idle_streams(bootstrap: Json, _: list[Backend]) -> None:
    """Far sooner than the operator's half an hour."""
    listener = bootstrap["static_resources"]["listeners"][0]
    listener["filter_chains"][0]["filters"][0]["typed_config"]["stream_idle_timeout"] = "1s"


async def test_an_answer_that_envoy_ends_because_no_byte_comes_is_a_stall(tmp_path: Path) -> None:
    async with running(tmp_path, "BUFFERED", time_out_idle_streams) as stack:

        async def began_and_broke() -> bool:
            async with stack.session.get(stack.url + "/v1/responses/slow") as response:
                if response.status != 200:
                    # On a busy machine the timeout may come before the headers.
                    return False
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.read()
                return True

        async def is_counted() -> bool:
            pods = [backend.name for backend in stack.decode]
            stalls = [await figure(stack, "outcomes_total", p, outcome="stalled") for p in pods]
            return sum(stalls) == 1

        await until(began_and_broke)
        await until(is_counted)


def use_second_pod_always(bootstrap: Json, decode: list[Backend]) -> None:
    """Envoy chooses a pod itself, like a gateway that uses an alternate."""
    clusters = bootstrap["static_resources"]["clusters"]
    second = fallback_cluster([f"127.0.0.1:{decode[1].port}"], None)
    second["name"] = second["load_assignment"]["cluster_name"] = PICKED
    clusters[:] = [second if cluster["name"] == PICKED else cluster for cluster in clusters]


def name_first_pod_in_metadata(bootstrap: Json, decode: list[Backend]) -> None:
    """Envoy sends all to the second pod and names the first one, which shows which of the two
    counts."""
    use_second_pod_always(bootstrap, decode)
    listener = bootstrap["static_resources"]["listeners"][0]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    first = f"127.0.0.1:{decode[0].port}"
    value = {"metadata_namespace": wire.METADATA_NAMESPACE, "value": {wire.SERVED_ENDPOINT: first}}
    manager["http_filters"].insert(
        0,
        {
            "name": "envoy.filters.http.set_metadata",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config",
                "metadata": [value],
            },
        },
    )


@pytest.mark.parametrize(
    ("change", "index"), [(use_second_pod_always, 1), (name_first_pod_in_metadata, 0)]
)
async def test_load_is_counted_on_the_pod_that_envoy_really_used(
    tmp_path: Path, change: Callable[[Json, list[Backend]], None], index: int
) -> None:
    async with running(tmp_path, "BUFFERED", change) as stack:
        counted, other = stack.decode[index], stack.decode[1 - index]
        sent = [
            asyncio.create_task(post(stack, {"model": "m", "prompt": f"{i}", "user": "slow"}))
            for i in range(6)
        ]

        async def all_counted() -> bool:
            return await figure(stack, "in_flight", counted.name) == len(sent)

        await until(all_counted)
        assert await figure(stack, "in_flight", other.name) == 0
        assert not stack.decode[0].received
        stack.decode[1].release.set()
        await asyncio.gather(*sent)
        answered = await figure(stack, "outcomes_total", counted.name, outcome="answered")
        assert answered == len(sent)

        async def have_ended() -> bool:
            return await figure(stack, "in_flight", counted.name) == 0

        # Envoy tells the EPP of the end after the client.
        await until(have_ended)
