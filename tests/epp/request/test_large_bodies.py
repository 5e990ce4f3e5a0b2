"""Large bodies are read by another process, with the same result, and it ends with its work."""

import asyncio
import json
import os
import signal
import sys
from dataclasses import replace
from io import BytesIO
from subprocess import run

import pytest

from tandem_contract.headers import MODEL_REWRITES
from tandem_contract.prompt_length import ANY_VOCABULARY, TokenSizes
from tandem_contract.request_kinds import RequestKind
from tandem_epp.backends.precise import PrecisePrefixes
from tandem_epp.exchange import HttpRequest, NotPlaced
from tandem_epp.placement.preparation import Preparation, read_body
from tandem_epp.placement.preparer import Preparer
from tandem_epp.prefix.blocks import BlockMatch
from tandem_epp.prefix.kv_events.collector import PreciseMatch
from tandem_epp.request import body_worker, form, large_bodies
from tandem_epp.request.body_fields import BadBody
from tandem_epp.request.body_worker import HEADER, KINDS, Reading
from tandem_epp.request.form import with_form_model
from tandem_epp.request.inference import parse_request
from tandem_epp.request.large_bodies import LargeBodies, WorkerFault

from ..placement.test_picker import NOW, PickerSetup
from ..real import until

CHAT = json.dumps(
    {
        "model": "m",
        "stream": True,
        "max_tokens": 7,
        "n": 2,
        "messages": [{"role": "user", "content": "word " * 220_000}],
    }
).encode()
IDS = json.dumps({"model": "m", "prompt": list(range(200_000))}).encode()
CASES = pytest.mark.parametrize(
    ("kind", "body"),
    [
        (RequestKind.CHAT, CHAT),
        (RequestKind.COMPLETIONS, IDS),
        (RequestKind.RESPONSES, b'{"input": "x", "previous_response_id": "resp_1"}'),
    ],
)

FORM_TYPE = "multipart/form-data; boundary=XB"
FILE = b'--XB\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n%b\r\n' % (
    b"sound" * 200_000
)
FIELD = b'--XB\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n'


@CASES
def test_a_reading_is_what_the_picker_would_read(kind: RequestKind, body: bytes) -> None:
    here, there = parse_request(kind, body), body_worker.read(kind, body).request()
    assert there is not None
    assert there.chain == here.chain
    assert there.prompt_tokens == here.prompt_tokens
    assert there.text_tokens == here.text_tokens
    assert there.last_block_tokens == here.last_block_tokens
    for name in (
        "model",
        "single_engine_reason",
        "previous_response",
        "needs_sidecar",
        "is_stream",
        "max_tokens",
        "form",
        "fingerprint",
        "text",
    ):
        assert getattr(there, name) == getattr(here, name)


def test_large_prompts_that_differ_in_their_last_words_fail_apart() -> None:
    first, second = (
        body_worker.read(RequestKind.CHAT, CHAT.replace(b'word "', last)).request()
        for last in (b'yes! "', b'nope "')
    )
    assert first is not None
    assert second is not None
    assert (first.chain, first.assumed_tokens) == (second.chain, second.assumed_tokens)
    assert first.fingerprint != second.fingerprint


def test_bodies_come_one_after_the_other() -> None:
    sent = b"".join(
        HEADER.pack(KINDS.index(kind), 0, len(body)) + body
        for kind, body in [
            (RequestKind.CHAT, CHAT),
            (None, b'{"model": "x"}'),
            (RequestKind.CHAT, b"{"),
        ]
    )
    answers = BytesIO()
    body_worker.serve(BytesIO(sent), answers)
    data, readings = answers.getvalue(), []
    while data:
        _, _, size = HEADER.unpack(data[: HEADER.size])
        readings.append(large_bodies._decoder.decode(data[HEADER.size : HEADER.size + size]))
        data = data[HEADER.size + size :]
    assert [reading.model for reading in readings] == ["m", "x", None]
    assert "not JSON" in readings[2].refusal


def test_the_program_ends_with_its_input() -> None:
    command = [sys.executable, "-m", "tandem_epp.request.body_worker"]
    assert run(command, input=b"", check=True).returncode == 0


async def test_bodies_are_read_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_bodies, "read", None)
    bodies = LargeBodies()
    first, second, named = await asyncio.gather(
        bodies.read(RequestKind.CHAT, CHAT),
        bodies.read(RequestKind.COMPLETIONS, IDS),
        bodies.read(None, b'{"model": "x"}'),
    )
    assert first == body_worker.read(RequestKind.CHAT, CHAT)
    assert second == body_worker.read(RequestKind.COMPLETIONS, IDS)
    assert named.model == "x"
    assert named.request() is None
    assert bodies.is_running
    await bodies.close()
    assert not bodies.is_running


@pytest.mark.parametrize(("field", "model"), [(FIELD, "m"), (b"", None)])
async def test_a_form_is_read_in_another_process_and_not_searched_again(
    monkeypatch: pytest.MonkeyPatch, field: bytes, model: str | None
) -> None:
    body = FILE + field + b"--XB--\r\n"
    expected = with_form_model(FORM_TYPE, body, "other")
    setup = PickerSetup(d="decode")
    precise = PrecisePrefixes(setup.fleet, lambda *_: None)
    preparer = Preparer(precise, setup.picker.rewrites, setup.metrics.faults, setup.flow_control())
    headers = {"content-type": FORM_TYPE, MODEL_REWRITES[0]: "other"}
    request = HttpRequest("POST", "/v1/audio/transcriptions", headers, None)
    monkeypatch.setattr(large_bodies, "read", None)
    monkeypatch.setattr(form, "find_form_model", None)
    context = preparer.prepare(request, body)
    assert context is not None
    async with context as preparation:
        assert isinstance(preparation, Preparation)
        assert preparation.reading is not None
        assert preparation.reading.model == model
        assert preparation.rewrite is not None
        assert preparation.rewrite.body == expected
    await preparer.close()


async def test_the_process_ends_when_it_has_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_bodies, "IDLE_SECONDS", 0.05)
    bodies = LargeBodies()
    for _ in range(2):
        assert (await bodies.read(None, b'{"model": "x"}')).model == "x"

        async def ended() -> bool:
            return not bodies.is_running

        await until(ended)
    await bodies.close()


async def test_closed_while_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has ended when `close` returns: its pipes do not outlive the event loop."""
    monkeypatch.setattr(large_bodies, "IDLE_SECONDS", 0.01)
    bodies, ending = LargeBodies(), asyncio.Event()
    await bodies.read(None, b"{}")
    process = bodies._process
    assert process is not None
    wait = process.wait

    async def wait_and_tell() -> int:
        ending.set()
        return await wait()

    monkeypatch.setattr(process, "wait", wait_and_tell)
    await ending.wait()
    await bodies.close()
    assert process.returncode is not None
    assert not bodies.is_running


async def test_a_body_that_comes_while_the_process_ends_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(large_bodies, "IDLE_SECONDS", 0.01)
    bodies = LargeBodies()
    late: list[asyncio.Future[Reading]] = []
    end = bodies._end

    async def end_slowly() -> None:
        await end()
        if not late:
            late.append(asyncio.ensure_future(bodies.read(None, b'{"model": "late"}')))
            # The body is in the queue, and this task not over.
            await asyncio.sleep(0)

    monkeypatch.setattr(bodies, "_end", end_slowly)
    assert (await bodies.read(None, b'{"model": "x"}')).model == "x"

    async def is_late() -> bool:
        return bool(late)

    await until(is_late)
    assert (await asyncio.wait_for(late[0], 30)).model == "late"
    await bodies.close()


async def test_a_body_that_ends_the_process_is_refused_and_the_next_is_read() -> None:
    bodies = LargeBodies()
    await bodies.read(None, b"{}")
    assert bodies._process is not None
    os.kill(bodies._process.pid, signal.SIGSTOP)
    reading = asyncio.ensure_future(bodies.read(RequestKind.CHAT, CHAT))
    await asyncio.sleep(0)
    os.kill(bodies._process.pid, signal.SIGKILL)
    assert "too much time or memory" in str((await reading).refusal)
    assert (await bodies.read(None, b'{"model": "x"}')).model == "x"
    await bodies.close()


async def test_a_stream_that_ends_gives_up_its_body() -> None:
    bodies = LargeBodies()
    readings = [asyncio.ensure_future(bodies.read(RequestKind.CHAT, CHAT)) for _ in range(3)]
    await asyncio.sleep(0)
    readings[1].cancel()
    assert (await readings[0]).model == (await readings[2]).model == "m"
    assert readings[1].cancelled()
    assert bodies._jobs.empty()
    await bodies.close()


async def test_without_a_process_the_body_is_read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    bodies = LargeBodies()
    assert (await bodies.read(RequestKind.CHAT, CHAT)).model == "m"
    await bodies.close()


async def test_a_bug_in_reading_is_the_callers_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    monkeypatch.setattr(large_bodies, "read", lambda *_: Reading(fault="KeyError()"))
    bodies = LargeBodies()
    with pytest.raises(WorkerFault, match="KeyError"):
        await bodies.read(RequestKind.CHAT, CHAT)
    await bodies.close()


def test_a_pick_uses_the_reading_instead_of_the_body() -> None:
    setup = PickerSetup(d="decode")
    reading = body_worker.read(RequestKind.CHAT, CHAT)
    preparation = Preparation(reading, reading.request())
    request = HttpRequest("POST", "/v1/chat/completions", {}, None, preparation)
    placement = setup.picker.place(request, b"not read", NOW)
    assert placement.decision.model == "m"
    assert placement.decision.prompt_tokens > 200_000
    with pytest.raises(BadBody, match="why"):
        read_body(Preparation(Reading(refusal="why")), request, CHAT)
    assert read_body(Preparation(Reading(model="x")), request, CHAT) == (None, "x")


@pytest.mark.parametrize(
    ("lengths", "is_refused"),
    [([4096, 4000], True), ([4096, 5000], False), ([4096, None], False), ([None, None], False)],
)
def test_a_text_that_is_too_long_for_every_pod_is_refused(
    lengths: list[int | None], is_refused: bool
) -> None:
    setup = PickerSetup(p="prefill", d="decode")
    for pod, length in zip(setup.fleet, lengths, strict=True):
        pod.max_model_len = length
    reading = body_worker.read(RequestKind.CHAT, CHAT)
    assert 4096 * ANY_VOCABULARY.longest < reading.text.certain < 5000 * ANY_VOCABULARY.longest
    preparation = Preparation(reading, reading.request())
    request = HttpRequest("POST", "/v1/chat/completions", {}, None, preparation)
    if not is_refused:
        assert setup.picker.place(request, b"not read", NOW)
        return
    with pytest.raises(NotPlaced) as refused:
        setup.picker.place(request, b"not read", NOW)
    response = refused.value.reply
    assert (response.status, refused.value.reason) == (400, "bad_request")
    assert b"maximum context length is 4096 tokens. However, your" in response.body


@pytest.mark.parametrize(
    ("prepared", "contents"),
    [
        (Preparation(precise=PreciseMatch(4097, BlockMatch({}), {})), b"4097 tokens"),
        (Preparation(precise=PreciseMatch(4096, BlockMatch({}), {})), None),
        (Preparation(sizes=TokenSizes(200, 64)), b"at least 5500 tokens"),
        (Preparation(sizes=TokenSizes(1000, 64)), None),
    ],
)
def test_a_tokenizer_tells_the_length_more_exactly(
    prepared: Preparation, contents: bytes | None
) -> None:
    setup = PickerSetup(d="decode")
    setup["d"].max_model_len = 4096
    reading = body_worker.read(RequestKind.CHAT, CHAT if prepared.precise is None else b"{}")
    preparation = replace(prepared, reading=reading, parsed=reading.request())
    request = HttpRequest("POST", "/v1/chat/completions", {}, None, preparation)
    if contents is None:
        assert setup.picker.place(request, b"not read", NOW)
        return
    with pytest.raises(NotPlaced) as refused:
        setup.picker.place(request, b"not read", NOW)
    assert contents in refused.value.reply.body
