"""Forms of audio by model, from a client through Envoy and a real sidecar to the engine."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

from tandem_contract import headers as wire
from tandem_epp.request.form import form_model
from tandem_operator.routing.envoy.http_filters import BodyMode

from ...sidecar.processes import sidecar
from ..real import Backend, ReceivedRequest, envoy, envoy_settings, epp, serving

pytestmark = pytest.mark.component

PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
MODES = pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "BUFFERED"])
SOUND = bytes(range(256)) * 4096 + b"\r\n--not the boundary\r\n"
"""1 MB: more than a chunk, and large for JSON."""


class Form(NamedTuple):
    """A form as it is sent."""

    body: bytes
    content_type: str


@dataclass
class Stack:
    """Two engines with a model each; the second one is behind a sidecar."""

    url: str
    session: aiohttp.ClientSession
    engines: dict[str, Backend]

    def take_forms(self) -> dict[str, list[ReceivedRequest]]:
        """The forms that came since the last call, by engine; a sidecar also probes its own."""
        forms = {}
        for model, engine in self.engines.items():
            forms[model] = [each for each in engine.received if each.path in PATHS]
            engine.received.clear()
        return forms

    async def send(self, path: str, form: Form, rewrite: str | None = None) -> tuple[int, bytes]:
        """`rewrite`: the model that is to serve it."""
        headers = {"content-type": form.content_type}
        if rewrite is not None:
            headers[wire.MODEL_REWRITE] = rewrite
        data = io.BytesIO(form.body)
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            return response.status, await response.read()


@asynccontextmanager
async def stack(directory: Path, mode: BodyMode) -> AsyncIterator[Stack]:
    engines = {"small": Backend("a"), "large": Backend("b")}
    for engine in engines.values():
        engine.release.set()
    async with AsyncExitStack() as parts:
        await parts.enter_async_context(serving(*engines.values()))
        url = f"http://127.0.0.1:{engines['large'].port}"
        proxy = await parts.enter_async_context(sidecar("--engine", url))
        ports = {"small": engines["small"].port, "large": proxy.listen.port}
        backends = [
            {"name": f"pod-{model}", "url": f"http://127.0.0.1:{port}", "models": [model]}
            for model, port in ports.items()
        ]
        config = directory / "router.yaml"
        config.write_text(json.dumps({"backends": backends}))
        picker = await parts.enter_async_context(epp(config))
        settings = envoy_settings(picker.grpc, body_mode=mode)
        url = await parts.enter_async_context(envoy(directory, settings))
        session = await parts.enter_async_context(aiohttp.ClientSession())
        yield Stack(url, session, engines)


async def audio(model: str | bytes | None, *, is_last: bool = True) -> Form:
    """A form with a sound, as aiohttp's client writes it. A model of bytes is a file."""
    form = aiohttp.FormData(default_to_multipart=True)
    name = "m" if isinstance(model, bytes) else None
    if model is not None and not is_last:
        form.add_field("model", model, filename=name)
    form.add_field("file", io.BytesIO(SOUND), filename="a.wav", content_type="audio/wav")
    form.add_field("stream", "false")
    if model is not None and is_last:
        form.add_field("model", model, filename=name)
    payload = form()
    return Form(await payload.as_bytes(), payload.headers["Content-Type"])


@MODES
async def test_a_form_goes_to_its_model_byte_for_byte(tmp_path: Path, mode: BodyMode) -> None:
    async with stack(tmp_path, mode) as running:
        for path in PATHS:
            for model in running.engines:
                for is_last in (True, False):
                    form = await audio(model, is_last=is_last)
                    status, answer = await running.send(path, form)
                    assert (status, answer) == (200, b"first last")
                    forms = running.take_forms()
                    [request] = forms.pop(model)
                    assert request.path == path
                    assert request.body == form.body
                    assert request.headers["content-type"] == form.content_type
                    assert list(forms.values()) == [[]]


@MODES
async def test_another_model_serves_a_form_whose_header_says_so(
    tmp_path: Path, mode: BodyMode
) -> None:
    async with stack(tmp_path, mode) as running:
        for model in ("small", "an-alias" * 10, None):
            for is_last in (True, False):
                form = await audio(model, is_last=is_last)
                answer = await running.send(PATHS[0], form, "large")
                assert answer == (200, b"first last")
                forms = running.take_forms()
                assert forms["small"] == []
                [request] = forms["large"]
                assert SOUND in request.body
                assert form_model(form.content_type, request.body) == "large"
                assert request.headers["content-length"] == str(len(request.body))
                assert wire.MODEL_REWRITE not in request.headers
        status, answer = await running.send(PATHS[0], await audio("small"), "unknown")
        assert status == 404
        assert "`unknown` does not exist" in json.loads(answer)["error"]["message"]


@MODES
async def test_wrong_forms_are_answered_with_the_place(tmp_path: Path, mode: BodyMode) -> None:
    async with stack(tmp_path, mode) as running:
        status, answer = await running.send(PATHS[0], await audio("other"))
        assert status == 404
        assert "`other` does not exist" in json.loads(answer)["error"]["message"]
        status, answer = await running.send(PATHS[0], await audio(b"small"))
        error = json.loads(answer)["error"]
        assert (status, error["param"]) == (400, "model")
        assert error["message"].startswith("model: a file (part 3, byte ")
        head = b"--b\r\nContent-Disposition: form-data; name=file\r\n\r\n"
        for form, message in (
            (Form(b"x", "multipart/form-data"), "content-type names no boundary"),
            (Form(b"x", "multipart/form-data; boundary=b"), "the form does not begin with"),
            (
                Form(head + SOUND, "multipart/form-data; boundary=b"),
                "part 1 of the form (byte 5): the form ends in it, at byte",
            ),
        ):
            status, answer = await running.send(PATHS[0], form)
            assert status == 400
            assert json.loads(answer)["error"]["message"].startswith(message)
        assert list(running.take_forms().values()) == [[], []]


@MODES
async def test_many_forms_at_once(tmp_path: Path, mode: BodyMode) -> None:
    async with stack(tmp_path, mode) as running:
        models = ["small", "large"] * 8
        answers = await asyncio.gather(
            *[running.send(PATHS[0], await audio(model)) for model in models]
        )
        assert {status for status, _ in answers} == {200}
        assert [len(forms) for forms in running.take_forms().values()] == [8, 8]
