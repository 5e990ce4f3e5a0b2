"""The program of `helm test`, with DecodePools whose gateway is a local server."""

import importlib.util
import json
from collections.abc import Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any
from urllib.error import HTTPError

import pytest

PROGRAM = Path(__file__).parents[2] / "charts/tandem/files/check.py"
MODELS = {"data": [{"id": "tiny-llama"}]}
COMPLETION = {"choices": [{"text": "x"}], "usage": {"completion_tokens": 1}}


class Gateway(ThreadingHTTPServer):
    """Answers with `status` and these bodies."""

    status, models, completion = 200, MODELS, COMPLETION
    broken_model = ""
    lacking = 0
    """Bytes of each body that are announced and not sent."""
    requests = 0


class Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_GET(self) -> None:
        self.server.requests += 1
        self._answer(self.server.models)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if request["model"] == self.server.broken_model:
            self.send_error(500)
        else:
            self._answer(self.server.completion)

    def _answer(self, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(self.server.status)
        self.send_header("x-continuum-routing-path", "unified")
        self.send_header("Content-Length", str(len(content) + self.server.lacking))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("helm_test_check", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.PAUSE = 0.0  # type: ignore[attr-defined]
    return module


def pool(gateway: Gateway, ready: str = "True", **status: Any) -> dict[str, Any]:
    condition = {"type": "Ready", "status": ready, "message": "no pod is ready"}
    endpoint = f"http://127.0.0.1:{gateway.server_address[1]}"
    return {
        "metadata": {"namespace": "team", "name": "d"},
        "status": {"endpoint": endpoint, "readyReplicas": 1, "conditions": [condition], **status},
    }


def test_a_ready_pool_answers(
    gateway: Gateway, check: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.answers(pool(gateway))
    assert "tiny-llama generated 1 token, routing path unified" in capsys.readouterr().out
    assert gateway.requests == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"status": 503}, "503"), ({"models": {"data": []}}, "no answer of an inference API"),
     ({"models": {"data": None}}, "no answer of an inference API"),
     ({"models": []}, "no answer of an inference API"), ({"lacking": 1}, "IncompleteRead"),
     ({"completion": {"error": "x"}}, "no answer of an inference API")],
)  # fmt: skip
def test_a_ready_pool_that_does_not_answer_fails_the_test(
    gateway: Gateway,
    check: ModuleType,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    words: str,
) -> None:
    vars(gateway).update(changes)
    assert not check.answers(pool(gateway))
    printed = capsys.readouterr().out
    assert words in printed
    assert "fix: kubectl -n team describe decodepool d" in printed
    assert gateway.requests == check.ATTEMPTS


def test_a_pool_that_wants_an_api_key_passes(gateway: Gateway, check: ModuleType) -> None:
    gateway.status = 401
    assert check.answers(pool(gateway))


@pytest.mark.parametrize(
    ("ready", "status", "words"),
    [("False", {}, "not ready: no pod is ready"), ("True", {"readyReplicas": 0}, "scaled to zero"),
     ("True", {"endpoint": None}, "another router")],
)  # fmt: skip
def test_a_pool_that_cannot_answer_is_named_and_not_asked(
    gateway: Gateway,
    check: ModuleType,
    capsys: pytest.CaptureFixture[str],
    ready: str,
    status: dict[str, Any],
    words: str,
) -> None:
    assert check.answers(pool(gateway, ready, **status))
    assert words in capsys.readouterr().out
    assert gateway.requests == 0


def test_each_model_of_a_shared_endpoint_is_asked(
    gateway: Gateway, check: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.models = {"data": [{"id": "a"}, {"id": "b"}]}
    gateway.broken_model = "b"
    assert not check.answers(pool(gateway))
    assert "500" in capsys.readouterr().out


def test_the_last_line_names_each_pool_that_does_not_answer(
    gateway: Gateway,
    check: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pools = [pool(gateway, endpoint="http://127.0.0.1:9"), pool(gateway)]
    pools[1]["metadata"]["name"] = "healthy"
    monkeypatch.setattr(check, "decode_pools", lambda _: pools)
    resources = {"resources": [{"name": kind} for kind in check.KINDS]}
    monkeypatch.setattr(check, "ask_api", lambda _: resources)
    assert check.main(f"http://127.0.0.1:{gateway.server_address[1]}/readyz", []) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "no answer from DecodePool team/d"


def test_a_part_that_does_not_answer_is_named(
    gateway: Gateway,
    check: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check.main("http://127.0.0.1:9/readyz", []) == 1
    assert capsys.readouterr().out.startswith("the operator did not answer at http://127.0.0.1:9/")

    def refuse(_: str) -> None:
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(check, "ask_api", refuse)
    assert check.main(f"http://127.0.0.1:{gateway.server_address[1]}/readyz", []) == 1
    assert "the API server did not answer at https://" in capsys.readouterr().out


@pytest.mark.parametrize("served", [[], ["prefillpools"]])
def test_crds_that_are_missing_are_named(
    gateway: Gateway,
    check: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    served: list[str],
) -> None:
    def answer(path: str) -> dict[str, Any]:
        if path or not served:
            raise HTTPError(path, 404, "Not Found", Message(), None)
        return {"resources": [{"name": name} for name in served]}

    monkeypatch.setattr(check, "ask_api", answer)
    assert check.main(f"http://127.0.0.1:{gateway.server_address[1]}/readyz", []) == 1
    assert "kubectl apply --server-side -f crds/" in capsys.readouterr().out
