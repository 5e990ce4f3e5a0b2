"""A decode backend fails before the client got a byte: another one serves the request."""

import asyncio
import json
from io import BytesIO

import pytest

from tandem_contract.prompt_length import EXHAUSTING
from tandem_epp.backends.outcomes import Outcome
from tandem_sidecar.settings import Settings

from ..sidecar.peers import FakeDecode, Script, Turn, hangs
from .conftest import DECODE, LOOPBACK, PATH, PROMPT, Harness


async def dies(turn: Turn) -> None:
    turn.die()


async def errs(turn: Turn) -> None:
    turn.answer(500, b"{}")


async def is_busy(turn: Turn) -> None:
    turn.answer(503, b"{}")


async def streams_an_error(turn: Turn) -> None:
    turn.stream()
    turn.event('{"error": {"message": "out of memory", "code": 500}}')
    turn.end()


FAILURES = [dies, errs, is_busy, streams_an_error]


@pytest.mark.parametrize("fails", FAILURES)
@pytest.mark.parametrize("split", [True, False])
async def test_another_backend_serves(harness: Harness, fails: Script, split: bool) -> None:
    await harness.prefill("p")
    failing = await harness.decode("d-0", fails, weight=1000)
    working = await harness.decode("d-1")
    await harness.start({"enabled": split})
    for number in range(20):
        response, body = await harness.ask({"model": "m", "prompt": [number] * 40})
        assert (response.status, response.headers[DECODE]) == (200, "d-1")
        assert json.loads(body) == {"choices": [{"text": "hello"}]}
        assert response.headers[PATH] == ("prefill_then_decode" if split else "unified")
        if failing.requests:
            break
    assert failing.requests
    assert working.requests
    assert await harness.metric('disaggregated_errors_total{phase="decode"}') >= 1
    assert await harness.metric('tandem_sidecar_outcomes_total{outcome="answered"}') == number + 1


async def test_a_refused_connection_is_a_failure_too(harness: Harness) -> None:
    failing = await harness.unified("u-0")
    await harness.unified("u-1")
    await harness.start()
    failing.close_port()
    for number in range(8):
        response, _ = await harness.ask({"model": "m", "prompt": [number] * 40})
        assert response.status == 200


async def test_other_requests_are_sent_elsewhere_too(harness: Harness) -> None:
    async def embeds(turn: Turn) -> None:
        turn.answer(200, b'{"data": []}')

    failing = await harness.decode("d-0", errs, role="unified")
    await harness.decode("d-1", embeds, role="unified")
    await harness.start()
    for _ in range(20):
        response, body = await harness.ask({"model": "m", "input": "Hi"}, "/v1/embeddings")
        assert (response.status, body) == (200, b'{"data": []}')
        if failing.requests:
            return
    raise AssertionError("the failing backend got no request")


@pytest.mark.parametrize("fails", FAILURES)
async def test_two_failures_are_the_clients_to_see(harness: Harness, fails: Script) -> None:
    decodes = [await harness.decode(f"u-{n}", fails, role="unified") for n in range(3)]
    await harness.start()
    response, _ = await harness.ask({"model": "m", "prompt": PROMPT, "stream": True})
    assert response.status == {dies: 502, errs: 500, is_busy: 503, streams_an_error: 500}[fails]
    # The engines, not their requests: what ends with a reused connection is sent on a new one.
    assert sum(bool(decode.requests) for decode in decodes) == 2


async def test_a_stream_that_begins_with_an_error_counts_as_a_failure_of_its_backend(
    harness: Harness,
) -> None:
    await harness.decode("u", streams_an_error, role="unified")
    await harness.start()
    response, body = await harness.ask({"model": "m", "prompt": PROMPT, "stream": True})
    assert response.status == 500
    assert json.loads(body)["error"]["message"] == "out of memory"
    (pod,) = harness.router.components.decisions.fleet
    assert pod.health.outcomes == {Outcome.ERROR: 1}


@pytest.mark.parametrize("split", [True, False])
async def test_a_fault_of_the_client_within_a_stream_is_asked_of_one_backend(
    harness: Harness, split: bool
) -> None:
    async def refuses(turn: Turn) -> None:
        turn.stream()
        turn.event('{"error": {"message": "no such tool", "code": 400}}')
        turn.end()

    if split:
        await harness.prefill("p")
    decodes = [await harness.decode(f"d-{number}", refuses) for number in range(2)]
    await harness.start()
    response, body = await harness.ask({"model": "m", "prompt": PROMPT, "stream": True})
    assert (response.status, json.loads(body)["error"]["message"]) == (400, "no such tool")
    assert sum(bool(decode.requests) for decode in decodes) == 1
    assert not any(
        pod.health.outcomes.get(Outcome.ERROR) for pod in harness.router.components.decisions.fleet
    )


@pytest.mark.parametrize(
    ("split", "path"),
    [(True, "/v1/completions"), (False, "/v1/completions"), (False, "/v1/embeddings")],
)
async def test_a_prompt_that_may_have_hung_an_engine_is_given_to_no_other(
    harness: Harness, split: bool, path: str
) -> None:
    async def hangs_with_it(turn: Turn) -> None:
        if turn.request.body:
            await hangs(turn)
        else:
            turn.answer(200, b"{}")

    if split:
        await harness.prefill("p")
    decodes = [await harness.decode(f"d-{number}", hangs_with_it) for number in range(2)]
    for decode in decodes:
        decode.health = hangs
    settings = Settings(listen=LOOPBACK, admin=LOOPBACK, silence_timeout=0.2)
    await harness.start(settings=settings)
    text = "x " * EXHAUSTING
    body = json.dumps({"model": "m", "prompt": text, "input": text}).encode()
    sent = {"content-type": "application/json"}
    async with harness.http.post(harness.url(path), data=BytesIO(body), headers=sent) as response:
        assert (response.status, response.headers["x-should-retry"]) == (502, "false")
        if path == "/v1/completions":
            assert response.headers[PATH] == ("prefill_then_decode" if split else "unified")
    asked = [[sent for sent in decode.requests if sent.body] for decode in decodes]
    assert sorted(map(len, asked)) == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_backend_says_is_not_to_be_retried_is_not(
    harness: Harness, *, stream: bool
) -> None:
    """A sidecar says so of a prompt that hung its prefill engine."""

    async def refuses(turn: Turn) -> None:
        turn.answer(504, b"{}", "x-should-retry: false")

    decodes = [await harness.decode(f"d-{number}", refuses) for number in range(2)]
    await harness.start(settings=Settings(listen=LOOPBACK, admin=LOOPBACK, resume=True))
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 4, "stream": stream}
    response, _ = await harness.ask(body)
    assert (response.status, response.headers["x-should-retry"]) == (504, "false")
    asked = [[sent for sent in decode.requests if sent.body] for decode in decodes]
    assert sorted(map(len, asked)) == [0, 1]


async def test_the_only_backend_is_not_asked_twice(harness: Harness) -> None:
    decode = await harness.decode("u", errs, role="unified")
    await harness.start()
    response, _ = await harness.ask()
    assert response.status == 500
    assert len(decode.requests) == 1


async def test_kv_is_released_through_another_backend_if_its_reader_died(harness: Harness) -> None:
    await harness.prefill("p")
    decodes = [await harness.decode(f"d-{number}") for number in range(2)]

    died: list[FakeDecode] = []

    def dies_if_first(decode: FakeDecode) -> Script:
        async def script(turn: Turn) -> None:
            if died:
                await decode.complete(turn)
                return
            died.append(decode)
            decode.close_port()
            turn.die()

        return script

    for decode in decodes:
        decode.generate = dies_if_first(decode)
    await harness.start()
    response, _ = await harness.ask()
    assert response.status == 200
    (other,) = [decode for decode in decodes if decode not in died]
    await asyncio.wait_for(other.released.wait(), 10)
    assert other.releases[0].json["kv_transfer_params"]["remote_engine_id"] == "engine-p"
