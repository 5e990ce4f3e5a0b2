"""No backend is ready: a request of a set that resumes streams waits until one is."""

import asyncio
import json
from pathlib import Path
from time import time
from typing import Any, Final

import pytest

from tandem_epp.backends.outcomes import Outcome
from tandem_router import waiting
from tandem_sidecar.settings import Settings

from ..sidecar.peers import FakeDecode, Script, Turn, hangs
from ..sidecar.resume.events import DONE
from ..sidecar.resume.scripted import asked, events, generates, without_head
from .conftest import LOOPBACK, PROMPT, Harness, until

RESUMES: Final = Settings(listen=LOOPBACK, admin=LOOPBACK, resume=True)
CHECKS: Final = {"interval": "100ms"}
WHOLE: Final = {"model": "m", "prompt": PROMPT, "max_tokens": 4}
"""A request whose answer is no stream."""


def crashes(engine: FakeDecode, after: int) -> Script:
    """The process of the engine ends after so many tokens."""

    def end(turn: Turn, last: bytes) -> None:
        turn.chunk(last)
        engine.crash()

    async def script(turn: Turn) -> None:
        if after:
            await generates(after, end)(turn)
        else:
            engine.crash()

    return script


def serving(*, split: bool) -> dict[str, Any]:
    """Prefill pods serve no request alone."""
    return {"enabled": split, "fallback_to_unified": False}


def waiters(harness: Harness) -> list[dict[str, object]]:
    described = [work.describe() for work in harness.router.components.lifecycle.work]
    return [each for each in described if each["phase"] == "waiting"]


async def until_one_waits(harness: Harness) -> None:
    await until(lambda: waiters(harness))


@pytest.mark.parametrize("has_keys", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("after", [0, 3])
async def test_a_stream_goes_on_at_its_engine_once_that_is_started_again(
    harness: Harness, tmp_path: Path, after: int, split: bool, has_keys: bool
) -> None:
    (keys := tmp_path / "keys").mkdir()
    (keys / "k").write_bytes(b"0123456789abcdef")
    if split:
        await harness.prefill("p")
    engine = await harness.decode("d")
    more = {"keys": keys} if has_keys else {}
    await harness.start(serving(split=split), settings=RESUMES, health_checks=CHECKS, **more)
    engine.script = generates()
    _, whole = await harness.ask(asked())
    engine.script = crashes(engine, after)
    asking = asyncio.create_task(harness.ask(asked()))
    await until_one_waits(harness)
    engine.script = generates(id="cmpl-of-another")
    await engine.restart()
    response, resumed = await asking
    assert response.status == 200
    assert without_head(events(resumed)) == without_head(events(whole))
    done = 'cause="crash",method="{}",result="done"'
    done = done.format("continued" if after else "begun_again")
    assert await harness.metric(f"tandem_sidecar_stream_moves_total{{{done}}}") == 1
    assert await harness.metric("tandem_sidecar_stream_moves_total") == 1


async def test_a_request_of_which_the_client_has_nothing_waits_too(harness: Harness) -> None:
    engine = await harness.decode("d")
    await harness.start({"enabled": False}, settings=RESUMES, health_checks=CHECKS)
    engine.script = crashes(engine, 0)
    asking = asyncio.create_task(harness.ask(WHOLE))
    await until_one_waits(harness)
    engine.script = engine.default
    await engine.restart()
    response, body = await asking
    assert (response.status, json.loads(body)) == (200, {"choices": [{"text": "hello"}]})


async def test_a_stream_returns_to_an_engine_that_failed_it_rather_than_to_none(
    harness: Harness,
) -> None:
    engines = [await harness.decode(f"d-{number}") for number in range(2)]
    await harness.start(
        {"enabled": False}, health_checks=CHECKS, resume={"enabled": True, "max_moves": 4}
    )
    scripts = [*[generates(2)] * 4, generates()]

    async def fails_often(turn: Turn) -> None:
        await scripts.pop(0)(turn)

    for engine in engines:
        engine.script = fails_often
    _, body = await harness.ask(asked())
    assert body.endswith(DONE)
    assert not scripts


@pytest.mark.parametrize("stream", [False, True])
async def test_engines_that_accept_no_connection_do_not_count_as_moves(
    harness: Harness, stream: bool
) -> None:
    engines = [await harness.decode(f"d-{number}") for number in range(6)]
    working = await harness.decode("d-6", generates() if stream else None)
    resume = {"enabled": True, "max_moves": 1}
    # No check finds those that are gone.
    checks = {"interval": "1h", "timeout": "1h", "unhealthy_threshold": 1000}
    await harness.start({"enabled": False}, health_checks=checks, resume=resume)
    for engine in engines:
        engine.crash()
    # Every other is preferred to this one until its next check, which never ends.
    working.metrics = hangs
    [pod] = [pod for pod in harness.router.components.decisions.fleet if pod.name == "d-6"]
    harness.router.components.decisions.fleet.ejections.record(pod, Outcome.RESET, time(), time())
    body = asked() if stream else WHOLE
    response, _ = await harness.ask(body)
    assert response.status == 200
    assert await harness.metric('disaggregated_errors_total{phase="decode"}') == len(engines)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_new_request_waits_for_a_backend(harness: Harness, path: str) -> None:
    engine = await harness.decode("d", generates())
    await harness.start({"enabled": False}, settings=RESUMES, health_checks=CHECKS)
    _, whole = await harness.ask(asked(is_chat="chat" in path), path)
    [pod] = harness.router.components.decisions.fleet
    engine.crash()
    await until(lambda: not pod.healthy)
    asking = asyncio.create_task(harness.ask(asked(is_chat="chat" in path), path))
    await until_one_waits(harness)
    assert waiters(harness)[0]["path"] is None
    await engine.restart()
    response, body = await asking
    assert response.status == 200
    assert without_head(events(body)) == without_head(events(whole))


async def test_what_generates_nothing_does_not_wait(harness: Harness) -> None:
    engine = await harness.decode("d")
    await harness.start({"enabled": False}, settings=RESUMES, health_checks=CHECKS)
    [pod] = harness.router.components.decisions.fleet
    engine.crash()
    await until(lambda: not pod.healthy)
    response, _ = await harness.ask({"model": "m", "input": "Hi"}, "/v1/embeddings")
    assert response.status == 503


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request waits for long."""
    monkeypatch.setattr(waiting, "WAIT_SECONDS", 0.1)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("split", [False, True])
async def test_a_stream_ends_with_an_error_if_no_engine_comes(
    harness: Harness, split: bool
) -> None:
    """If it is split, another backend is ready, but it only prefills."""
    if split:
        await harness.prefill("p")
    engine = await harness.decode("d")
    await harness.start(serving(split=split), settings=RESUMES, health_checks=CHECKS)
    engine.script = crashes(engine, 3)
    _, body = await harness.ask(asked())
    *some, error = events(body)
    assert some
    message = error["error"]["message"]
    assert message.startswith(f"decode failed: {engine.address}: ")
    assert message.endswith("no other engine can go on: no further engine may serve the request")
    lost = 'cause="crash",method="none",result="no_engine"'
    assert await harness.metric(f"tandem_sidecar_stream_moves_total{{{lost}}}") == 1
    assert await harness.metric("tandem_sidecar_stream_moves_total") == 1
    assert await harness.metric('tandem_sidecar_outcomes_total{outcome="cut"}') == 1


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("body", [WHOLE, asked()])
async def test_an_error_is_the_answer_if_no_engine_comes(
    harness: Harness, body: dict[str, Any]
) -> None:
    engine = await harness.decode("d")
    await harness.start({"enabled": False}, settings=RESUMES, health_checks=CHECKS)
    engine.script = crashes(engine, 0)
    response, answer = await harness.ask(body)
    assert (response.status, response.headers["x-continuum-decode-backend"]) == (502, "d")
    assert "decode failed" in json.loads(answer)["error"]["message"]
    assert await harness.metric('tandem_sidecar_outcomes_total{outcome="failed"}') == 1
    [pod] = harness.router.components.decisions.fleet
    await until(lambda: not pod.healthy)
    response, answer = await harness.ask(body)
    assert response.status == 503
    assert "no backend can serve the request now" in json.loads(answer)["error"]["message"]


@pytest.mark.parametrize("is_new", [False, True])
async def test_a_client_that_leaves_is_not_waited_for(harness: Harness, is_new: bool) -> None:
    engine = await harness.decode("d")
    await harness.start({"enabled": False}, settings=RESUMES, health_checks=CHECKS)
    engine.script = crashes(engine, 3)
    [pod] = harness.router.components.decisions.fleet
    if is_new:
        engine.crash()
        await until(lambda: not pod.healthy)
    asking = asyncio.create_task(harness.ask(asked()))
    await until_one_waits(harness)
    asking.cancel()
    await until(lambda: not harness.router.components.lifecycle.work)
    asked_before = len([sent for sent in engine.requests if sent.body])
    await engine.restart()
    await until(lambda: pod.ready and pod.health.is_available)
    engine.script = generates()
    response, _ = await harness.ask(asked())
    assert response.status == 200
    assert len([sent for sent in engine.requests if sent.body]) == asked_before + 1


async def test_the_end_of_a_drain_ends_what_waits(harness: Harness) -> None:
    engine = await harness.decode("d")
    await harness.start({"enabled": False}, settings=RESUMES, health_checks=CHECKS)
    engine.script = crashes(engine, 3)
    asking = asyncio.create_task(harness.ask(asked()))
    await until_one_waits(harness)
    lifecycle = harness.router.components.lifecycle
    lifecycle.timeout = 0
    lifecycle.drain()
    _, body = await asking
    assert "no further engine" in events(body)[-1]["error"]["message"]
    assert not lifecycle.work
