"""What the edge accepts, vLLM's own request classes read the same, or refuse. No engine starts.

`differential` compares with parsers like vLLM's; here the classes themselves read the bodies, in
vLLM's environment.
"""

import base64
import json
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings

from tandem_contract.request_kinds import RequestKind
from tandem_contract.transfer_params import CLIENT_FORBIDDEN

from ..differential.edge import read_json
from ..differential.readers import EngineReading
from ..differential.strategies import json_bodies
from ..differential.test_bodies import check_same
from .engines import VENV

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PARSERS: Final = ("python-multipart", "starlette", "pydantic", "pydantic-core")
_READ: Final = """
import base64, json, sys
from importlib.metadata import version
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

CLASSES = {
    "completions": CompletionRequest,
    "chat": ChatCompletionRequest,
    "responses": ResponsesRequest,
    "messages": AnthropicMessagesRequest,
    "generate": GenerateRequest,
}
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
parsers, forbidden = json.loads(sys.argv[1])


def read(kind, body):
    # As FastAPI does.
    try:
        # Not in place: a validator fills in defaults.
        sent = json.loads(body)
        request = CLASSES[kind].model_validate(json.loads(body))
    except Exception:
        return None
    get = lambda name: getattr(request, name, None)
    given = {name: get(name) for name in request.model_fields_set}
    # Not the defaults: completions without a limit have 16 tokens.
    known = [name for name in LIMITS if name in type(request).model_fields]
    limits = [get(name) for name in known if sent.get(name) is not None]
    extra = getattr(get("sampling_params"), "extra_args", None)
    places = (given, get("vllm_xargs") or {}, extra or {})
    return {
        "model": get("model"),
        "stream": bool(get("stream")),
        "max_tokens": next((limit for limit in limits if limit is not None), None),
        "n": 1 if get("n") is None else get("n"),
        "forbidden": [
            name for name in forbidden for place in places if place.get(name) is not None
        ],
    }


print(json.dumps({name: version(name) for name in parsers}), flush=True)
for line in sys.stdin:
    kind, body = json.loads(line)
    print(json.dumps(read(kind, base64.b64decode(body))), flush=True)
"""


class Reader:
    """vLLM's classes, in a process of its environment."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.versions: dict[str, str] = self._answer()

    def read(self, kind: RequestKind, body: bytes) -> EngineReading | None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([kind, base64.b64encode(body).decode()]) + "\n")
        self._process.stdin.flush()
        reading = self._answer()
        if reading is None:
            return None
        return EngineReading(**{**reading, "forbidden": tuple(reading["forbidden"])})

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    arguments = json.dumps([PARSERS, sorted(CLIENT_FORBIDDEN)])
    command = (str(VENV / "bin/python"), "-W", "ignore", "-c", _READ, arguments)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        yield Reader(process)


@settings(
    max_examples=500,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(json_bodies())
def test_vllms_classes_read_what_the_edge_read(
    reader: Reader, request_body: tuple[RequestKind, bytes]
) -> None:
    kind, body = request_body
    edge = read_json(kind, body)
    engine = None if edge is None else reader.read(kind, edge.forwarded)
    if edge is None or engine is None:
        return
    if kind is RequestKind.GENERATE:
        # Its sampling parameters have types of their own.
        assert engine.forbidden == ()
    else:
        check_same(edge, engine)


@pytest.mark.parametrize("kind", RequestKind)
def test_the_classes_accept_a_plain_request_and_keep_forbidden_fields(
    reader: Reader, kind: RequestKind
) -> None:
    """Otherwise the test above would compare nothing."""
    fields: dict[str, object] = {
        "model": "m",
        "prompt": "p",
        "input": "p",
        "messages": [{"role": "user", "content": "p"}],
        "max_tokens": 7,
    }
    if kind is RequestKind.RESPONSES:
        del fields["prompt"]  # A template, which vLLM refuses.
    if kind is RequestKind.GENERATE:
        fields = {"token_ids": [1], "sampling_params": {"max_tokens": 7}}
    params = {"kv_transfer_params": {"do_remote_prefill": True}}
    reading = reader.read(kind, json.dumps({**fields, **params}).encode())
    assert reading is not None
    assert reading.forbidden == ("kv_transfer_params",)


def test_forms_are_compared_with_the_parsers_that_vllm_has(reader: Reader) -> None:
    """`differential` runs with the versions in this environment."""
    assert reader.versions == {name: version(name) for name in PARSERS}
