"""Each backend's API key reaches that backend alone, and no log, page or error."""

import json
import logging
import os
from pathlib import Path

import pytest

from tandem_router.configuration import load
from tandem_sidecar.observability import logs
from tandem_sidecar.observability.logs import LogFormat

from ..sidecar.peers import Peer, Turn
from .conftest import PROMPT, Harness

KEYS = {"PREFILL_KEY": "s3same-prefill", "DECODE_KEY": "s3same-decode"}
CLIENTS = {"authorization": "Bearer of-the-client"}


def key(name: str) -> dict[str, str]:
    """The section of a backend whose key is in the environment."""
    return {"api_key": f"${{{name}}}"}


async def pair(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> tuple[Peer, Peer, Peer]:
    """A prefill and a decode backend with keys, and a unified one without."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    prefill = await harness.prefill("p", credentials=key("PREFILL_KEY"), models=["m"])
    decode = await harness.decode("d", credentials=key("DECODE_KEY"), models=["m"])
    keyless = await harness.unified("u", models=["other"])
    return prefill, decode, keyless


async def test_each_backend_gets_its_own_key(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode, keyless = await pair(harness, monkeypatch)
    await harness.start()
    await harness.ask(headers=CLIENTS)
    assert prefill.requests[0].headers["authorization"] == "Bearer s3same-prefill"
    assert decode.requests[0].headers["authorization"] == "Bearer s3same-decode"
    await harness.ask({"model": "other", "prompt": PROMPT}, headers=CLIENTS)
    assert keyless.requests[0].headers["authorization"] == "Bearer of-the-client"


async def test_a_release_has_the_key_too(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(turn: Turn) -> None:
        turn.answer(500, b"{}")

    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    await harness.prefill("p")
    decode = await harness.decode("d", fails, credentials=key("DECODE_KEY"))
    await harness.start()
    await harness.ask()
    await decode.released.wait()
    assert decode.releases[0].headers["authorization"] == "Bearer s3same-decode"


@pytest.mark.usefixtures("own_logging")
async def test_keys_are_in_no_log_page_or_error(
    harness: Harness,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def fails(turn: Turn) -> None:
        turn.answer(500, b"{}")

    async def dies(turn: Turn) -> None:
        turn.die()

    logs.configure(LogFormat.JSON, "debug")
    caplog.set_level(logging.DEBUG)
    prefill, decode, _ = await pair(harness, monkeypatch)
    await harness.start()
    texts = []
    for script in (None, fails, dies):
        if script is not None:
            prefill.script = decode.script = script
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/models"):
            response, body = await harness.ask(path=path, headers=CLIENTS)
            texts += [body.decode(), str(response.headers)]
    for path in ("/metrics", "/state", "/debug/decisions", "/debug/pods", "/readyz"):
        texts.append(await harness.page(path))
    decision = json.loads(await harness.page("/debug/decisions?limit=1"))[0]
    texts.append(await harness.page(f"/requests/{decision['request_id']}"))
    configuration = load(harness.file, os.environ)
    texts += [repr(configuration), str(configuration.router.backends), caplog.text]
    texts += [*capfd.readouterr()]
    assert all("s3same" not in text for text in texts)
    assert all("of-the-client" not in text for text in texts)


def test_a_wrong_section_does_not_show_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "router.yaml"
    for section in ("{api_key: s3same, other: 1}", "[s3same]", "{api_key: [s3same]}", "s3same"):
        file.write_text(f"backends: [{{name: d, url: 'http://d:1', credentials: {section}}}]")
        with pytest.raises(ValueError, match="credentials") as caught:
            load(file, {})
        assert "s3same" not in str(caught.value)
