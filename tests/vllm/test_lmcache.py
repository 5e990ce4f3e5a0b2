"""Real LMCache: its server between two engines, by LMCacheMPConnector.

LMCacheConnectorV1 does not run on a CPU; of it, the keys are tested.

The server lists a chunk some time after the prefill's answer. So an answer is always that of one
engine, and whether the decode engine loaded KV depends on which was first.
"""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

from tandem_contract import headers, metrics, ports
from tandem_contract.paths import RoutingPath
from tandem_local.addresses import allocate
from tandem_local.process import tail
from tandem_operator.pods.manifests import pods

from ..operator.pool_yaml import pair as pools
from .api_requests import KINDS
from .engines import ON_A_CPU, REASONING, VENV, Spawned, forked
from .pairs import Moved, Pair, in_phase, running_pair, stopped, until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CHUNK = 32
"""Tokens; a multiple of the engines' block size."""
ADMIN_PORT = 8080
"""The server's HTTP API."""


_PRINT_KEYS = """
import json, os, sys
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.token_database import ChunkedTokenDatabase
algorithm, *seeds = sys.argv[1:]
config = LMCacheEngineConfig.from_defaults(pre_caching_hash_algorithm=algorithm)
for seed in seeds:
    os.environ["PYTHONHASHSEED"] = seed
    database = ChunkedTokenDatabase(config, None)
    keys = [key for *_, key in database.process_tokens(list(range(512)), make_key=False)]
    print("keys", json.dumps(keys))
"""
"""The keys of a prompt of two chunks, for each seed."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Spawned]]:
    """LMCache's server, which both engines use as if they were on one node, and its address."""
    log = tmp_path_factory.mktemp("server") / "lmcache.log"
    listening = {"server": [ports.LMCACHE_MP, ADMIN_PORT]}
    address = allocate(listening, seed=str(log))["server"]
    command = forked(
        "lmcache.v1.multiprocess.http_server",
        *("--host", address, "--port", str(ports.LMCACHE_MP)),
        *("--http-host", address, "--http-port", str(ADMIN_PORT)),
        *("--chunk-size", str(CHUNK), "--l1-size-gb", "0.5", "--eviction-policy", "LRU"),
        *("--supported-transfer-mode", "auto", "--disable-observability"),
    )
    process = Spawned(command, {"PATH": os.environ["PATH"], **ON_A_CPU}, log)
    try:
        _wait_until_healthy(address, process)
        yield address, process
    finally:
        process.end()


@pytest.fixture(scope="module")
def lmcache(
    model: Path, tmp_path_factory: pytest.TempPathFactory, server: tuple[str, Spawned]
) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("lmcache")
    extra = {
        "lmcache.mp.host": f"tcp://{server[0]}",
        # Seconds after which engines notice that the server has died, and which a busy server has
        # to answer. An engine that gave it up for dead recovers.
        "lmcache.mp.heartbeat_interval": 3,
    }
    # vLLM's worker searches all modules for kernels when it starts, and fails at one of LMCache's,
    # which a fork of the process that has read the configuration would have imported already.
    settings = {"connector": "lmcache-mp", "extraConfig": extra, "imports_anew": True}
    reasoning = {"prefill_args": REASONING, "decode_args": REASONING}
    with running_pair(model, directory, **settings, **reasoning) as running:
        yield running


@pytest.fixture
async def pair(lmcache: Pair, http: aiohttp.ClientSession, request: pytest.FixtureRequest) -> Pair:
    await lmcache.restore(http, request.session.testsfailed)
    return lmcache


@pytest.mark.parametrize("kind", KINDS)
async def test_the_answer_is_that_of_one_engine(
    pair: Pair, http: aiohttp.ClientSession, kind: str
) -> None:
    request_kind = KINDS[kind]
    moved = await Moved(http, pair.decode.url("/metrics")).begin()
    numbers = itertools.count()

    async def has_loaded() -> bool:
        """Whether the decode engine found the KV of a new prompt, whose answer must be right."""
        words = f"{kind} {next(numbers)}: " + "how far is the harbour? " * 20
        body = request_kind.body(words)
        handed = await pair.handed_off(http, request_kind, body)
        assert handed.headers[headers.ROUTING_PATH] == RoutingPath.PREFILL_THEN_DECODE
        alone = await pair.alone(http, request_kind, body)
        assert request_kind.text(handed) == request_kind.text(alone) != ""
        return await moved.by(metrics.ENGINE_PROMPT_BY_SOURCE, source="external_kv_transfer") > 100

    await until(has_loaded, 120)


async def test_a_thinking_budget_passes_the_prefill_leg(
    pair: Pair, http: aiohttp.ClientSession
) -> None:
    """vLLM refuses a budget of `max_tokens` or more, and the leg has one token."""
    request_kind = KINDS["messages"]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = request_kind.body("how far is the harbour? " * 40, thinking=thinking)
    body |= {"max_tokens": 1025, "stream": True}
    # Its many tokens are of no interest: leaving aborts them.
    url = pair.url(request_kind.path)
    async with http.post(url, json=body, headers=pair.split) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.headers[headers.ROUTING_PATH] == RoutingPath.PREFILL_THEN_DECODE


async def test_requests_side_by_side_get_their_own_kv(
    pair: Pair, http: aiohttp.ClientSession
) -> None:
    request_kind = KINDS["completions"]
    bodies = [request_kind.body(f"{i} is what I say. " * 20) for i in range(8)]
    alone = [request_kind.text(await pair.alone(http, request_kind, body)) for body in bodies]
    handed = await asyncio.gather(*(pair.handed_off(http, request_kind, b) for b in bodies))
    assert [request_kind.text(answer) for answer in handed] == alone


async def test_a_prefill_engine_killed_before_its_kv_is_read(
    pair: Pair, http: aiohttp.ClientSession
) -> None:
    """Whatever it stored stays, and the decode engine computes the rest."""
    request_kind = KINDS["completions"]
    bodies = [request_kind.body(f"{i} is what we said. " * 60) for i in range(4)]
    async with stopped(pair.decode):
        asking = [asyncio.create_task(pair.handed_off(http, request_kind, body)) for body in bodies]
        await in_phase(pair, http, "decoding", len(bodies))
        pair.prefill.process.end()
    handed = [request_kind.text(answer) for answer in await asyncio.gather(*asking)]
    assert handed == [
        request_kind.text(await pair.alone(http, request_kind, body)) for body in bodies
    ]


async def test_without_the_server_the_decode_engine_computes(
    lmcache: Pair, http: aiohttp.ClientSession, server: tuple[str, Spawned]
) -> None:
    """After the test before, the prefill engine is dead, too."""
    _, process = server
    process.signal(signal.SIGKILL)
    request_kind = KINDS["completions"]
    body = request_kind.body("Nothing was stored. " * 20)
    handed = await lmcache.handed_off(http, request_kind, body)
    assert request_kind.text(handed) == request_kind.text(
        await lmcache.alone(http, request_kind, body)
    )


def test_pods_of_another_revision_have_other_keys() -> None:
    """LMCache's own keys, with the seeds and the algorithm that the operator renders."""
    store = {"connector": "lmcache", "extraConfig": {"lmcache.remote_url": "redis://store:6379"}}
    seeds = []
    for revision in ("a", "b"):
        model = {"name": "org/model", "revision": revision}
        for pod in pods(pools({"model": model, "transfer": store})[0])[:2]:
            (container,) = pod["spec"]["containers"]
            env = {variable["name"]: variable.get("value") for variable in container["env"]}
            args = container["args"]
            config = json.loads(args[args.index("--kv-transfer-config") + 1])
            seeds.append(env["PYTHONHASHSEED"])
    algorithm = config["kv_connector_extra_config"]["lmcache.pre_caching_hash_algorithm"]
    command = (str(VENV / "bin/python"), "-c", _PRINT_KEYS, algorithm, *seeds)
    env = {"PATH": os.environ["PATH"], **ON_A_CPU}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    prefill_a, decode_a, prefill_b, decode_b = (
        json.loads(line.removeprefix("keys "))
        for line in done.stdout.splitlines()
        if line.startswith("keys ")
    )
    assert (prefill_a, prefill_b) == (decode_a, decode_b)
    assert len(prefill_a) == 2
    assert not set(prefill_a) & set(prefill_b)


def _wait_until_healthy(address: str, process: Spawned) -> None:
    url = f"http://{address}:{ADMIN_PORT}/healthcheck"
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not process.ended():
        with suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    raise AssertionError("\n".join(["LMCache's server did not start:", *tail(process.log)]))
