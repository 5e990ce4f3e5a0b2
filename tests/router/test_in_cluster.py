"""The router as the front of an endpoint on Kubernetes: it watches the pods of a real API server,
whose sidecars are processes, with scripted engines behind them."""

import asyncio
import signal
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import yaml
from click.testing import CliRunner

from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_local.ports import free_port
from tandem_router.configuration import LEAST_IN_FLIGHT
from tandem_router.main import main

from ..epp.real import until
from ..sidecar.peers import FakeDecode, Turn, hangs, is_prefill, produces
from ..sidecar.resume.scripted import asked, events, generates, until_gone, without_head
from .cluster import Cluster
from .conftest import DECODE, PATH, PREFILL, PROMPT
from .processes import router

pytestmark = [pytest.mark.component, pytest.mark.control_plane]

KINDS: Final = (RequestKind.COMPLETIONS, RequestKind.CHAT)
RESUMES: Final[dict[str, Any]] = {"enabled": True}
CLUSTER: Final = ("--discovery", "kubernetes", "--namespace", "n")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_survives_the_loss_of_its_pod_and_its_drain(
    cluster: Cluster, kind: RequestKind
) -> None:
    for name in ("d-0", "d-1", "d-2"):
        await cluster.decode(name)
    body, path = asked(is_chat=kind is RequestKind.CHAT), PATHS[kind]
    async with cluster.router("d-0", "d-1", "d-2", resume=RESUMES) as process:
        cluster.script(generates())
        async with cluster.http.post(process.url(path), json=body) as response:
            whole = without_head(events(await response.read()))

        async def is_lost(name: str) -> None:
            cluster.sidecars[name].process.kill()
            await cluster.pods.delete(name, grace=0)

        for leaves in (cluster.pods.draining, is_lost):
            for turns in cluster.turns.values():
                turns.clear()
            cluster.script(generates(4, pause=until_gone), generates(id="cmpl-of-another"))
            async with cluster.http.post(process.url(path), json=body) as response:
                begin = await response.content.readuntil(b"\n\n")
                [(name, [turn])] = [pair for pair in cluster.turns.items() if pair[1]]
                await leaves(name)
                await asyncio.wait_for(turn.gone.wait(), 20)
                resumed = events(begin + await response.read())
            assert without_head(resumed) == whole
            del cluster.engines[name], cluster.turns[name]
            await until(lambda: cluster.serves(process, *cluster.engines))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_reads_the_kv_of_the_pod_that_drains(
    cluster: Cluster, kind: RequestKind
) -> None:
    """The router ends its request there once the next engine generates: until then the pod's
    sidecar has work, so that its engine is kept, though it generates the stream no more."""
    for name in ("d-0", "d-1"):
        await cluster.decode(name)
    prefill = await cluster.prefill("p-0")
    body, path = asked(is_chat=kind is RequestKind.CHAT), PATHS[kind]
    if kind is RequestKind.CHAT:
        # As long a text as the other prompt.
        body["messages"] = [{"role": "user", "content": "hi " * 200}]
    going = asyncio.Event()

    async def waits(turn: Turn) -> None:
        await going.wait()
        await generates(id="cmpl-of-another")(turn)

    serving = {"enabled": True}
    async with cluster.router(
        "d-0", "d-1", "p-0", resume=RESUMES, disaggregated_serving=serving, **LEAST_IN_FLIGHT
    ) as process:
        cluster.script(generates())
        # Of another salt, so that no pod has the prompt's KV.
        salted = body | {"cache_salt": "other"}
        async with cluster.http.post(process.url(path), json=salted) as response:
            whole = without_head(events(await response.read()))
        for turns in cluster.turns.values():
            turns.clear()
        cluster.script(generates(4, pause=until_gone), produces, waits)
        async with cluster.http.post(process.url(path), json=body) as response:
            begin = b"".join([await response.content.readuntil(b"\n\n") for _ in range(2)])
            assert len(prefill.requests) == 2
            [(name, [turn])] = [pair for pair in cluster.turns.items() if pair[1]]
            [other] = cluster.turns.keys() - {name}
            await cluster.pods.draining(name)

            async def goes_on() -> bool:
                return bool(cluster.turns[other])

            await until(goes_on)
            [_, leg] = cluster.turns[name]
            assert is_prefill(leg.request)
            # The leg takes the stream's place at the engine.
            await asyncio.wait_for(turn.gone.wait(), 20)
            assert await cluster.running(name) == 1
            going.set()

            async def has_left() -> bool:
                return await cluster.running(name) == 0

            await until(has_left)
            assert without_head(events(begin + await response.read())) == whole
        assert len(prefill.requests) == 2


async def test_each_stream_of_one_client_id_leaves_its_engine(cluster: Cluster) -> None:
    """Clients choose their ids. The engine may have no room for the legs while the streams run."""
    await cluster.decode("d-0")
    await cluster.prefill("p-0")
    going, serving = asyncio.Event(), {"enabled": True}

    async def goes_on(turn: Turn) -> None:
        if is_prefill(turn.request):
            await produces(turn)
        else:
            await going.wait()
            await generates()(turn)

    async with cluster.router(
        "d-0", "p-0", resume=RESUMES, disaggregated_serving=serving, **LEAST_IN_FLIGHT
    ) as process:

        async def ask(salt: str) -> bytes:
            # Of salts of their own, so that both are split.
            body, head = asked() | {"cache_salt": salt}, {"x-request-id": "of-a-client"}
            async with cluster.http.post(process.url(), json=body, headers=head) as response:
                begin = [await response.content.readuntil(b"\n\n") for _ in range(2)]
                begun.release()
                return b"".join(begin) + await response.read()

        cluster.script(*[generates(4, pause=until_gone)] * 2)
        begun = asyncio.Semaphore(0)
        streams = [asyncio.create_task(ask(salt)) for salt in ("one", "other")]
        for _ in streams:
            await begun.acquire()
        turns = list(cluster.turns["d-0"])
        await cluster.decode("d-1")
        await until(lambda: cluster.serves(process, "d-0", "d-1", "p-0"))
        cluster.script(*[goes_on] * 4)
        await cluster.pods.draining("d-0")
        for turn in turns:
            await asyncio.wait_for(turn.gone.wait(), 20)
        assert not any(stream.done() for stream in streams)
        going.set()
        for got in await asyncio.gather(*streams):
            assert b"[DONE]" in got
        assert len(cluster.turns["d-0"]) == 4


async def test_a_pod_that_has_not_read_the_kv_is_not_asked_for_it(cluster: Cluster) -> None:
    """It drains, too, before its engine has begun."""
    for name in ("d-0", "d-1", "d-2"):
        await cluster.decode(name)
    prefill = await cluster.prefill("p-0")
    serving = {"enabled": True}
    async with cluster.router(
        "d-0", "d-1", "d-2", "p-0", resume=RESUMES, disaggregated_serving=serving, **LEAST_IN_FLIGHT
    ) as process:
        cluster.script(generates(4, pause=until_gone), produces, hangs, generates())
        async with cluster.http.post(process.url(), json=asked()) as response:
            await response.content.readuntil(b"\n\n")
            await response.content.readuntil(b"\n\n")
            [first] = [name for name, turns in cluster.turns.items() if turns]
            await cluster.pods.draining(first)

            def moved() -> list[str]:
                return [name for name, turns in cluster.turns.items() if turns and name != first]

            async def goes_on() -> bool:
                return bool(moved())

            await until(goes_on)
            [second] = moved()
            prefill.requests.clear()
            await cluster.pods.draining(second)
            assert b"[DONE]" in await response.read()
        assert len(cluster.turns[first]) == 2
        assert len(cluster.turns[second]) == 1
        assert len(prefill.requests) == 1


async def test_behind_mutual_tls_the_pod_that_drains_is_not_asked(cluster: Cluster) -> None:
    """The other sidecar has no certificate for it; so the request there ends at once."""
    cluster.use_mutual_tls()
    for name in ("d-0", "d-1"):
        await cluster.decode(name)
    prefill = await cluster.prefill("p-0")
    going, serving = asyncio.Event(), {"enabled": True}

    async def waits(turn: Turn) -> None:
        await going.wait()
        await generates()(turn)

    async with cluster.router(
        "d-0", "d-1", "p-0", resume=RESUMES, disaggregated_serving=serving, **LEAST_IN_FLIGHT
    ) as process:
        cluster.script(generates(4, pause=until_gone), waits)
        async with cluster.http.post(process.url(), json=asked()) as response:
            for _ in range(2):
                await response.content.readuntil(b"\n\n")
            [(name, [turn])] = [pair for pair in cluster.turns.items() if pair[1]]
            await cluster.pods.draining(name)
            await asyncio.wait_for(turn.gone.wait(), 20)
            going.set()
            assert b"[DONE]" in await response.read()
        assert len(cluster.turns[name]) == 1
        assert len(prefill.requests) == 2


async def test_a_client_that_leaves_while_kv_is_read_frees_all_engines(cluster: Cluster) -> None:
    for name in ("d-0", "d-1"):
        await cluster.decode(name)
    await cluster.prefill("p-0")
    serving = {"enabled": True}
    async with cluster.router(
        "d-0", "d-1", "p-0", resume=RESUMES, disaggregated_serving=serving, **LEAST_IN_FLIGHT
    ) as process:
        cluster.script(generates(4, pause=until_gone), produces, hangs)
        async with cluster.http.post(process.url(), json=asked()) as response:
            for _ in range(2):
                await response.content.readuntil(b"\n\n")
            [name] = [name for name, turns in cluster.turns.items() if turns]
            [other] = cluster.turns.keys() - {name}
            await cluster.pods.draining(name)

            async def goes_on() -> bool:
                return bool(cluster.turns[other])

            await until(goes_on)
        for turn in (cluster.turns[name][0], *cluster.turns[other]):
            await asyncio.wait_for(turn.gone.wait(), 20)


async def test_a_router_that_drains_still_sees_pods_drain(cluster: Cluster) -> None:
    for name in ("d-0", "d-1"):
        await cluster.decode(name)
    body = asked(is_chat=False)
    async with cluster.router("d-0", "d-1", resume=RESUMES) as process:
        cluster.script(generates())
        async with cluster.http.post(process.url(), json=body) as response:
            whole = without_head(events(await response.read()))
        for turns in cluster.turns.values():
            turns.clear()
        cluster.script(generates(4, pause=until_gone), generates(id="cmpl-of-another"))
        async with cluster.http.post(process.url(), json=body) as response:
            begin = await response.content.readuntil(b"\n\n")
            [(name, [turn])] = [pair for pair in cluster.turns.items() if pair[1]]
            process.process.send_signal(signal.SIGTERM)

            async def is_draining() -> bool:
                async with cluster.http.get(process.url("/health")) as answer:
                    return answer.status == 503

            await until(is_draining)
            await cluster.pods.draining(name)
            await asyncio.wait_for(turn.gone.wait(), 20)
            resumed = events(begin + await response.read())
        assert without_head(resumed) == whole
        assert await process.exit_status() == 0


async def test_a_pod_that_cannot_be_connected_to_is_replaced_before_the_first_token(
    cluster: Cluster,
) -> None:
    for name in ("d-0", "d-1"):
        await cluster.decode(name)
    async with cluster.router("d-0", "d-1") as process:
        cluster.sidecars["d-0"].process.kill()
        await cluster.sidecars["d-0"].process.wait()
        cluster.script(*[generates()] * 4)
        for _ in range(4):
            async with cluster.http.post(process.url(), json=asked()) as response:
                assert response.status == 200
                await response.read()
        assert len(cluster.turns["d-1"]) == 4


@pytest.mark.parametrize("tls", [False, True])
async def test_sidecars_hand_off_and_count(cluster: Cluster, tls: bool) -> None:
    if tls:
        cluster.use_mutual_tls()
    await cluster.decode("d-0")
    prefill = await cluster.prefill("p-0")
    serving = {"enabled": True}
    async with cluster.router(
        "d-0", "p-0", disaggregated_serving=serving, **LEAST_IN_FLIGHT
    ) as process:
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 4}
        headers = {"x-request-id": "abc", PATH: "unified", "x-tandem-plan": "forged"}
        async with cluster.http.post(process.url(), json=body, headers=headers) as response:
            assert await response.read() == b'{"choices": [{"text": "hello"}]}'
        assert response.status == 200
        served = response.headers
        assert [served[name] for name in (PATH, PREFILL, DECODE, "x-request-id")] == [
            "prefill_then_decode", "p-0", "d-0", "abc",
        ]  # fmt: skip
        assert "x-tandem-timing" not in served
        assert len(prefill.requests) == 1
        # The sidecar knows the request by the client's id, as `tandem trace` asks for it.
        async with cluster.http.get(cluster.sidecars["d-0"].admin_url("/requests/abc")) as answer:
            assert answer.status == 200
        async with cluster.http.get(process.admin_url("/debug/decisions?request_id=abc")) as answer:
            [decision] = await answer.json()
        assert (decision["path"], decision["status"]) == ("prefill_then_decode", 200)
        counted = []
        for url in (process.admin_url("/metrics"), cluster.sidecars["d-0"].admin_url("/metrics")):
            async with cluster.http.get(url) as answer:
                lines = (await answer.text()).splitlines()
            samples = [line for line in lines if line.startswith("disaggregated_requests_total{")]
            counted.append(sum(float(line.rpartition(" ")[2]) for line in samples))
        assert counted == [0, 1], "a sum over both has each request once"


async def test_a_router_that_starts_knows_what_the_others_have_placed(cluster: Cluster) -> None:
    await cluster.decode("d-0")
    addresses = [f"127.0.0.1:{free_port('127.0.0.1')}" for _ in range(2)]
    flags = [
        ("--peers", addresses[0], "--peers", addresses[1], "--peer-listen", address)
        for address in addresses
    ]
    cluster.script(generates(2, pause=until_gone))
    async with cluster.router("d-0", flags=flags[0]) as first:
        # Before the second router, whose own session replaces this one.
        http = cluster.http
        async with http.post(first.url(), json=asked(is_chat=False)) as response:
            await response.content.readuntil(b"\n\n")
            async with cluster.router("d-0", flags=flags[1]) as second:
                await until(lambda: cluster.is_ready(second))
                assert [pod["in_flight"] for pod in await cluster.backends(second)] == [1]


async def test_routers_serve_side_by_side(cluster: Cluster) -> None:
    for name in ("d-0", "d-1"):
        await cluster.decode(name)
    addresses = [f"127.0.0.1:{free_port('127.0.0.1')}" for _ in range(2)]
    peers = tuple(flag for address in addresses for flag in ("--peers", address))
    flags = [(*peers, "--peer-listen", address) for address in addresses]
    body = asked(is_chat=False)
    async with cluster.router("d-0", "d-1", flags=flags[0]) as first:
        http = cluster.http
        async with cluster.router("d-0", "d-1", flags=flags[1]) as second:
            await until(lambda: cluster.is_ready(second))

            async def is_served_by_the_second() -> bool:
                cluster.script(generates())
                async with cluster.http.post(second.url(), json=body) as response:
                    await response.read()
                return response.status == 200

            cluster.script(generates(4, pause=until_gone))
            async with http.post(first.url(), json=body) as held:
                await held.content.readuntil(b"\n\n")
                [(busy, [turn])] = [pair for pair in cluster.turns.items() if pair[1]]

                async def is_known() -> bool:
                    pods = await cluster.backends(second)
                    return {pod["name"]: pod["in_flight"] for pod in pods}[busy] == 1

                await until(is_known)
                assert await is_served_by_the_second()
                first.process.kill()
                with pytest.raises(aiohttp.ClientError):
                    await held.read()
            await asyncio.wait_for(turn.gone.wait(), 20)
            assert await is_served_by_the_second()


async def test_a_router_without_pods_is_ready_and_says_so_to_clients(cluster: Cluster) -> None:
    async with cluster.router() as process:
        await until(lambda: cluster.is_ready(process))
        async with cluster.http.post(process.url(), json=asked()) as response:
            assert response.status == 503
            assert "no backend" in await response.text()
        await cluster.decode("d-0")
        await until(lambda: cluster.serves(process, "d-0"))
        cluster.script(generates())
        async with cluster.http.post(process.url(), json=asked()) as response:
            assert response.status == 200
            await response.read()


async def test_after_sigterm_each_answer_is_the_last_of_its_connection_until_the_drain(
    tmp_path: Path,
) -> None:
    file = tmp_path / "router.yaml"
    async with FakeDecode() as engine, aiohttp.ClientSession() as http:
        file.write_text(yaml.safe_dump({"backends": [{"name": "d", "url": engine.url}]}))
        async with router(file, "--drain-delay", "1h", "--no-warm-up") as process:
            process.process.send_signal(signal.SIGTERM)

            async def is_leaving() -> bool:
                body = {"model": "m", "prompt": PROMPT}
                async with http.post(process.url(), json=body) as response:
                    assert response.status == 200
                    await response.read()
                return response.headers.get("connection") == "close"

            await until(is_leaving)
            async with http.get(process.url("/health")) as response:
                assert response.status == 503, "a load balancer sends requests elsewhere"
            process.process.send_signal(signal.SIGTERM)
            assert await process.exit_status() == 0


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--namespace", "n"), "need --discovery kubernetes"),
        ((*CLUSTER, "--endpoint", "chat"), "needs --namespace, --endpoint and --plan-key-dir"),
        ((*CLUSTER, "--plan-key-dir", "."), "needs --namespace, --endpoint and --plan-key-dir"),
        ((*CLUSTER, "--endpoint", "chat", "--plan-key-dir", "."), "has no key"),
        (
            (*CLUSTER, "--endpoint", "chat", "--plan-key-dir", ".", "--workers", "2"),
            "run more replicas instead",
        ),
    ],
)
def test_flags_that_contradict_each_other_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["--config", "router.yaml", *flags])
    assert result.exit_code == 2
    assert problem in result.output
