"""The timing that the sidecar reports of real vLLM, which sends none of its own."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tandem_contract import headers, metrics
from tandem_contract.timing import Timing, parse_timing

from ..epp.estimates.learning import ENGINE, Requests, learn
from ..sidecar.processes import sidecar
from .api_requests import COUNT, KINDS
from .engines import MODEL_NAME
from .pairs import Moved, Pair
from .single import SingleVllm, single_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


async def timing_of(
    pair: Pair, http: aiohttp.ClientSession, kind: str, body: dict[str, Any]
) -> Timing:
    answer = await pair.handed_off(http, KINDS[kind], body)
    assert answer.status == 200
    return parse_timing(answer.headers[headers.TIMING])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_prefill_leg_of_each_kind_is_reported(
    pair: Pair, http: aiohttp.ClientSession, kind: str, stream: bool
) -> None:
    text = f"timing {kind} {stream}: " + "how deep is the harbour? " * 20
    body = KINDS[kind].body(text, stream=stream)
    computed = await Moved(http, pair.prefill.url("/metrics")).begin()
    first = await timing_of(pair, http, kind, body)
    second = await timing_of(pair, http, kind, body)
    assert first.leg is not None
    assert first.prompt == second.prompt
    assert first.prompt is not None
    assert first.prompt > 100
    assert second.cached is not None
    assert second.cached > 100
    counted = (first.computed or 0) + (second.computed or 0)
    local = await computed.by(metrics.ENGINE_PROMPT_BY_SOURCE, source="local_compute")
    assert counted == local


async def test_an_engine_that_serves_alone_is_reported(
    pair: Pair, http: aiohttp.ClientSession
) -> None:
    # Several answers to one prompt are never split.
    body = KINDS["completions"].body("alone in the harbour " * 20, n=2, temperature=1.0)
    timing = await timing_of(pair, http, "completions", body)
    assert timing.leg is not None
    assert (timing.prompt or 0) > 100
    assert timing.generated == 2 * COUNT
    stream = await timing_of(pair, http, "completions", body | {"stream": True})
    assert stream.leg is not None
    assert stream.prompt is None


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SingleVllm]:
    """On one core, and without NIXL, so that the truth has little noise."""
    core = max(os.sched_getaffinity(0))
    prefix = ("taskset", "--cpu-list", str(core))
    with single_vllm(model, tmp_path_factory.mktemp("engine"), prefix=prefix) as running:
        yield running


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
async def test_the_epp_learns_the_engines_own_prefill_times_from_a_sidecar(
    engine: SingleVllm, tmp_path: Path, is_stream: bool
) -> None:
    await engine.ready()
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "k1").write_bytes(b"0123456789abcdef")
    async with sidecar("--engine", engine.url, "--plan-key-dir", str(keys)) as before:
        backends = [unified(f"http://{before.listen}")]
        requests = Requests(MODEL_NAME, is_stream=is_stream, plan_keys=keys)
        learned = await learn(tmp_path, engine.url, backends, requests)
        assert learned.reports == len(learned.requests)
        learned.check()


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
async def test_the_epp_learns_the_engines_own_prefill_times_without_a_sidecar(
    engine: SingleVllm, tmp_path: Path, is_stream: bool
) -> None:
    """vLLM sends the headers of a stream at once."""
    await engine.ready()
    requests = Requests(MODEL_NAME, is_stream=is_stream)
    learned = await learn(tmp_path, engine.url, [unified(engine.url)], requests)
    assert learned.reports == 0
    learned.check()


async def test_the_epp_learns_the_engines_own_prefill_times_from_hand_offs(
    pair: Pair, tmp_path: Path
) -> None:
    backends = [
        {"name": ENGINE, "url": pair.prefill.url(""), "role": "prefill", "models": [MODEL_NAME]},
        {"name": "decode", "url": pair.url(""), "role": "decode", "models": [MODEL_NAME]},
    ]
    requests = Requests(MODEL_NAME, plugins=("always-disagg-pd-decider",))
    (await learn(tmp_path, pair.prefill.url(""), backends, requests)).check()


def unified(url: str) -> dict[str, Any]:
    """The engine as a backend."""
    return {"name": ENGINE, "url": url, "role": "unified", "models": [MODEL_NAME]}
