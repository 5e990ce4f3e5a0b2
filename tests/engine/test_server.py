"""The HTTP side over real sockets, with a scripted engine behind it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from tandem_contract import headers
from tandem_contract.timing import parse_timing
from tandem_contract.transfer_params import PREFILL_LEG, TransferParams
from tandem_engine.chat import ChatTemplate
from tandem_engine.metrics import EngineMetrics
from tandem_engine.served_model import ServedModel
from tandem_engine.server import EngineServer
from tandem_engine.text import Tokenizer
from tandem_engine.transfer.wire import MAX_ID
from tandem_engine.types import Delta, RemoteDecode, Request, RequestRejected, TokenLogprobs

from .fake_engine import TIMING, FakeEngine, answer_with, write_tokenizer
from .serving import listening

REMOTE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "p",
    "remote_request_id": "r1",
    "remote_host": "127.0.0.9",
    "remote_port": 5600,
    "remote_block_ids": [[1, 2]],
    "remote_num_tokens": 5,
    "remote_prefill_cached_tokens": 2,
    "tp_size": 1,
}


@dataclass
class Client:
    engine: FakeEngine
    server: EngineServer
    http: aiohttp.ClientSession
    port: int

    async def post(self, path: str, body: object, **options: Any) -> tuple[int, Any]:
        async with self.http.post(path, json=body, **options) as response:
            return response.status, await response.json()

    async def complete(self, **body: object) -> dict[str, Any]:
        status, answer = await self.post("/v1/completions", {"prompt": "hello", **body})
        assert status == 200, answer
        return answer

    async def refused(self, body: object, path: str = "/v1/completions") -> tuple[int, str, str]:
        status, answer = await self.post(path, body)
        error = answer["error"]
        assert error["code"] == status
        return status, error["message"], error["param"]

    async def events(self, path: str, **body: object) -> list[Any]:
        async with self.http.post(path, json={"stream": True, **body}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            return [_event(part) for part in (await response.text()).split("\n\n") if part]


def _event(part: str) -> Any:
    payload = part.removeprefix("data: ")
    return payload if payload == "[DONE]" else json.loads(payload)


Connect = Callable[..., Awaitable[Client]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    directory = tmp_path_factory.mktemp("model")
    write_tokenizer(directory)
    return ServedModel(
        ("tiny", "alias"), "/models/tiny", 64, 300, Tokenizer(directory), ChatTemplate(directory)
    )


@pytest.fixture
async def connect(model: ServedModel) -> AsyncIterator[Connect]:
    async with AsyncExitStack() as stack:

        async def _connect(engine: FakeEngine, **options: Any) -> Client:
            server = EngineServer(engine, model, EngineMetrics("tiny"), **options)
            port = await stack.enter_async_context(listening(server.connections()))
            http = await stack.enter_async_context(
                aiohttp.ClientSession(f"http://127.0.0.1:{port}")
            )
            return Client(engine, server, http, port)

        yield _connect


async def test_a_completion_has_vllms_fields(connect: Connect) -> None:
    client = await connect(FakeEngine(answer_with("world")))
    async with client.http.post(
        "/v1/completions",
        json={"prompt": "hello", "model": "alias"},
        headers={"X-Request-Id": "r7"},
    ) as response:
        answer = await response.json()
        assert parse_timing(response.headers[headers.TIMING]) == TIMING
    created = answer.pop("created")
    assert isinstance(created, int)
    assert answer == {
        "id": "cmpl-r7",
        "object": "text_completion",
        "model": "alias",
        "choices": [
            {
                "index": 0,
                "text": "world",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
            }
        ],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 5,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
        "kv_transfer_params": None,
    }
    (request,) = client.engine.requests
    assert request.request_id.startswith("r7-")
    assert request.prompt_token_ids == tuple(b"hello")
    assert request.sampling.max_tokens == 16


async def test_sampling_fields_reach_the_engine(connect: Connect) -> None:
    client = await connect(FakeEngine(answer_with("x")))
    fields = {
        "max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 11,
        "stop_token_ids": [9], "ignore_eos": True, "logprobs": 2,
    }  # fmt: skip
    await client.complete(**fields, unknown={"a": 1}, frequency_penalty=0, echo=False)
    sampling = client.engine.requests[0].sampling
    assert {name: getattr(sampling, name) for name in fields} == {**fields, "stop_token_ids": (9,)}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([97, 98], [b"ab"]),
        ([[97], [98, 99]], [b"a", b"bc"]),
    ],
)
async def test_every_form_of_prompt(connect: Connect, prompt: object, expected: Any) -> None:
    client = await connect(FakeEngine(answer_with("xy")))
    answer = await client.complete(prompt=prompt, n=2, seed=5)
    assert [request.prompt_token_ids for request in client.engine.requests] == [
        tuple(ids) for ids in expected for _ in range(2)
    ]
    assert [request.sampling.seed for request in client.engine.requests] == [5, 6] * len(expected)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert answer["usage"]["completion_tokens"] == 4 * len(expected)


async def test_a_chat_is_rendered_by_the_models_template(connect: Connect) -> None:
    client = await connect(FakeEngine(answer_with("hi")))
    content = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = {"messages": [{"role": "user", "content": content}], "return_token_ids": True}
    status, answer = await client.post("/v1/chat/completions", body)
    assert status == 200
    prompt = (256, *b"user: one\ntwo\nassistant:")
    (request,) = client.engine.requests
    assert request.prompt_token_ids == prompt
    assert request.sampling.max_tokens == 64 - len(prompt)
    assert answer["object"] == "chat.completion"
    assert answer["prompt_token_ids"] == list(prompt)
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": []},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": list(b"hi"),
        }
    ]


async def test_a_completion_stream(connect: Connect) -> None:
    client = await connect(FakeEngine(answer_with("ä!")))
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, usage, end_marker = await client.events(
        "/v1/completions", prompt="hello", stream_options=options, return_token_ids=True
    )
    assert end_marker == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    choices = [chunk["choices"][0] for chunk in chunks]
    # Half of the character waits for its other half.
    assert [choice["text"] for choice in choices] == ["", "ä", "!", ""]
    assert [choice["token_ids"] for choice in choices] == [[0xC3], [0xA4], [0x21], []]
    assert [choice["prompt_token_ids"] for choice in choices] == [list(b"hello"), None, None, None]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


async def test_a_chat_stream(connect: Connect) -> None:
    client = await connect(FakeEngine(answer_with("ok")))
    *chunks, end_marker = await client.events(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "hello"}],
        return_token_ids=True,
    )
    assert end_marker == "[DONE]"
    assert [chunk["object"] for chunk in chunks] == ["chat.completion.chunk"] * 4
    # The role comes before the first token, as in vLLM.
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""}, {"content": "o"}, {"content": "k"}, {"content": ""},
    ]  # fmt: skip
    assert "token_ids" not in chunks[0]["choices"][0]
    assert chunks[0]["prompt_token_ids"][0] == 256
    assert "prompt_token_ids" not in chunks[1]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_stream_headers_wait_for_the_first_piece(connect: Connect) -> None:
    client = await connect(FakeEngine())
    pending = asyncio.ensure_future(
        client.http.post("/v1/completions", json={"prompt": "hello", "stream": True})
    )
    await client.engine.submitted.wait()
    assert not pending.done()
    client.engine.generations[0].say(Delta(token_ids=(97,), timing=TIMING))
    response = await pending
    assert parse_timing(response.headers[headers.TIMING]) == TIMING
    assert b'"text":"a"' in await response.content.readline()
    client.engine.generations[0].say(Delta(finish_reason="length"))
    assert (await response.text()).endswith("data: [DONE]\n\n")


async def test_chunks_of_a_stream_carry_their_choice_index(connect: Connect) -> None:
    client = await connect(FakeEngine(answer_with("abc")))
    *chunks, _ = await client.events("/v1/completions", prompt=["x", "y"], n=2)
    texts = ["", "", "", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["abc"] * 4


async def test_a_stop_string_ends_the_sequence_in_the_engine(connect: Connect) -> None:
    client = await connect(FakeEngine(lambda _: [Delta(token_ids=(b,)) for b in b"one END two"]))
    answer = await client.complete(stop=["END", "never"])
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        "one ",
        "stop",
        "END",
    )
    assert answer["usage"]["completion_tokens"] == len("one END")
    assert client.engine.aborted == [client.engine.requests[0].request_id]


async def test_a_stop_token_leaves_no_text_but_counts(connect: Connect) -> None:
    deltas = [Delta(token_ids=(97,)), Delta(token_ids=(98,), finish_reason="stop", stop_token=98)]
    client = await connect(FakeEngine(lambda _: deltas))
    answer = await client.complete(stop_token_ids=[98], return_token_ids=True)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["stop_reason"], choice["token_ids"]) == ("a", 98, [97, 98])
    assert client.engine.aborted == []
    assert (await client.complete())["choices"][0]["stop_reason"] is None


def _with_logprobs(_: Request) -> list[Delta]:
    top = ((97, -0.5), (98, float("-inf")))
    return [
        Delta(token_ids=(97,), logprobs=(TokenLogprobs(-0.5, top),)),
        Delta(token_ids=(99,), logprobs=(TokenLogprobs(-2.0, top),), finish_reason="length"),
    ]


async def test_logprobs_of_a_completion(connect: Connect) -> None:
    client = await connect(FakeEngine(_with_logprobs))
    answer = await client.complete(logprobs=2)
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["a", "c"],
        "token_logprobs": [-0.5, -2.0],
        "top_logprobs": [{"a": -0.5, "b": -9999.0}, {"c": -2.0, "a": -0.5, "b": -9999.0}],
        "text_offset": [0, 1],
    }
    *chunks, _ = await client.events("/v1/completions", prompt="x", logprobs=2)
    assert [c["choices"][0]["logprobs"]["text_offset"] for c in chunks] == [[0], [1]]


async def test_logprobs_of_a_chat(connect: Connect) -> None:
    client = await connect(FakeEngine(_with_logprobs))
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1}
    _, answer = await client.post("/v1/chat/completions", body)
    assert client.engine.requests[0].sampling.logprobs == 1
    first, _ = answer["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("a", -0.5, [97])
    assert first["top_logprobs"][1]["logprob"] == -9999.0


async def test_a_prefill_leg_answers_with_its_params(connect: Connect) -> None:
    client = await connect(FakeEngine(answer_with("x", kv_transfer_params=REMOTE)))
    answer = await client.complete(max_tokens=1, kv_transfer_params=json.loads(PREFILL_LEG))
    assert client.engine.requests[0].kv == RemoteDecode()
    assert answer["kv_transfer_params"] == REMOTE
    assert client.engine.released_holds.empty()


async def test_a_decode_request_passes_its_params_to_the_engine(connect: Connect) -> None:
    client = await connect(FakeEngine(answer_with("x")))
    answer = await client.complete(kv_transfer_params={**REMOTE, "new_field": [1]})
    kv = client.engine.requests[0].kv
    assert isinstance(kv, TransferParams)
    assert (kv.remote_host, kv.remote_block_ids) == ("127.0.0.9", ((1, 2),))
    # The prefill's figure, not what this engine found.
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert client.engine.released == []


async def test_kv_of_a_streamed_prefill_is_freed_as_no_event_carries_its_params(
    connect: Connect,
) -> None:
    client = await connect(FakeEngine(answer_with("x", kv_transfer_params=REMOTE)))
    leg = json.loads(PREFILL_LEG)
    events = await client.events("/v1/completions", prompt="x", kv_transfer_params=leg)
    assert all("kv_transfer_params" not in event for event in events)
    assert await client.engine.released_holds.get() == client.engine.requests[0].request_id


async def test_kv_whose_prefill_answer_never_arrived_is_freed(connect: Connect) -> None:
    client = await connect(FakeEngine())
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    body = b'{"prompt": "x", "max_tokens": 1, "kv_transfer_params": %s}' % PREFILL_LEG
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
        % (len(body), body)
    )
    await client.engine.submitted.wait()
    # More than all buffers on the way hold, so that the answer is under way until it is read.
    params = {**REMOTE, "padding": "x" * (32 << 20)}
    last = Delta(token_ids=(97,), finish_reason="length", kv_transfer_params=params)
    client.engine.generations[0].say(last)
    await reader.readuntil(b"200 OK")
    assert client.engine.released_holds.empty()
    writer.close()
    await writer.wait_closed()
    released = await client.engine.released_holds.get()
    assert released == client.engine.requests[0].request_id


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        ({"model": "unknown"}, 404),
        ({"temperature": -1}, 400),
        ({"top_k": "many"}, 400),
        ({"prompt": [1] * 64}, 400),
        ({"max_tokens": 1000}, 400),
        ({"n": 2}, 400),
    ],
)
async def test_a_refused_decode_leg_frees_the_producer(
    connect: Connect, wrong: dict[str, object], status: int
) -> None:
    client = await connect(FakeEngine())
    body = {"prompt": "x", "kv_transfer_params": REMOTE, **wrong}
    assert (await client.refused(body))[0] == status
    await client.engine.release_seen.wait()
    assert [params.remote_request_id for params in client.engine.released] == ["r1"]
    assert client.engine.requests == []


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"do_remote_prefill": True}, "remote_engine_id is missing"),
        ({**REMOTE, "remote_block_ids": None}, "remote_block_ids is missing"),
        ({**REMOTE, "remote_port": "x"}, "remote_port"),
        ({**REMOTE, "do_remote_decode": True}, "one leg does one"),
        ([], "not an object"),
    ],
)
async def test_params_that_name_nothing_to_pull(
    connect: Connect, params: object, message: str
) -> None:
    client = await connect(FakeEngine())
    status, text, param = await client.refused({"prompt": "x", "kv_transfer_params": params})
    assert (status, param) == (400, "kv_transfer_params")
    assert message in text


async def test_a_request_rejected_by_the_engine_is_a_400(connect: Connect) -> None:
    def script(request: Request) -> list[Delta]:
        if len(client.engine.requests) == 1:
            raise RequestRejected("more blocks than there are")
        return []

    client = await connect(FakeEngine(script))
    status, message, _ = await client.refused({"prompt": ["a", "b"]})
    assert (status, message) == (400, "more blocks than there are")
    assert client.engine.aborted == [client.engine.requests[0].request_id]


async def test_an_engine_error_before_the_first_byte(connect: Connect) -> None:
    client = await connect(FakeEngine(lambda _: [Delta(finish_reason="error", error="no KV")]))
    for stream in (False, True):
        status, message, _ = await client.refused({"prompt": "x", "stream": stream})
        assert (status, message) == (500, "no KV")


async def test_an_engine_error_in_mid_stream_is_an_event_and_no_done(connect: Connect) -> None:
    deltas = [Delta(token_ids=(97,)), Delta(finish_reason="error", error="the device is gone")]
    client = await connect(FakeEngine(lambda _: deltas))
    first, last = await client.events("/v1/completions", prompt="x")
    assert first["choices"][0]["text"] == "a"
    assert last["error"]["message"] == "the device is gone"
    assert last["error"]["code"] == 500


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_aborts_its_sequences(
    connect: Connect, stream: bool
) -> None:
    client = await connect(FakeEngine())
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    body = json.dumps({"prompt": "hello", "n": 2, "stream": stream}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
        % (len(body), body)
    )
    await client.engine.submitted.wait()
    client.engine.generations[0].say(Delta(token_ids=(97,)))
    if stream:
        await reader.readuntil(b"data: ")
    writer.close()
    await writer.wait_closed()
    await client.engine.abort_seen.wait()
    assert sorted(client.engine.aborted) == sorted(r.request_id for r in client.engine.requests)
    assert await client.server.drain(60)
    async with client.http.get("/metrics") as response:
        page = await response.text()
    assert 'request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 2.0' in page


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", b'{"prompt": "x",\n "n": }', "line 2, column 7"),
        ("completions", b'{"prompt": "\xff"}', "not UTF-8: line 1, column 13"),
        ("completions", b"[1]", "not a JSON object"),
        ("completions", b"", "line 1, column 1"),
        ("completions", b"[" * 100_000, "nested too deeply"),
        ("completions", b'{"prompt": "\\ud800"}', "not JSON"),
        ("completions", b'{"prompt": NaN}', "not JSON"),
        ("completions", b"{}", "prompt is missing"),
        ("completions", b'{"prompt": []}', "prompt is empty"),
        ("completions", b'{"prompt": ""}', "prompt is empty"),
        ("completions", b'{"prompt": 7}', "prompt has a wrong type"),
        ("completions", b'{"prompt": ["a", 1]}', "prompt[1]: expected str, got int"),
        ("completions", b'{"prompt": [[1], [2, "a"]]}', "prompt[1][1]: expected int, got str"),
        ("completions", b'{"prompt": [300]}', "token id 300 is outside the vocabulary of 300"),
        ("completions", b'{"prompt": [-1]}', "token id -1 is outside"),
        ("completions", b'{"prompt": "x", "max_tokens": "5"}', "max_tokens: expected int"),
        ("completions", b'{"prompt": "x", "max_tokens": 0}', "max_tokens is 0"),
        ("completions", b'{"prompt": "x", "max_tokens": 64}', "maximum context length is 64"),
        ("completions", b'{"prompt": "x", "min_tokens": 17}', "min_tokens (17) is above"),
        ("completions", b'{"prompt": "x", "temperature": -0.1}', "temperature is -0.1"),
        ("completions", b'{"prompt": "x", "temperature": 1e999}', "out of range"),
        ("completions", b'{"prompt": "x", "temperature": 1e30}', "it must be 0 to 100"),
        (
            "completions",
            b'{"prompt": "x", "stop_token_ids": [999]}',
            "stop_token_ids: token id 999",
        ),
        ("completions", b'{"prompt": "x", "top_p": 0}', "top_p is 0"),
        ("completions", b'{"prompt": "x", "top_k": -2}', "top_k is -2"),
        ("completions", b'{"prompt": "x", "top_k": 2147483648}', "top_k is 2147483648"),
        ("completions", b'{"prompt": "x", "seed": 1e3}', "seed: expected int"),
        ("completions", b'{"prompt": "x", "seed": 9223372036854775808}', "seed is"),
        ("completions", b'{"prompt": "x", "n": 0}', "n is 0"),
        ("completions", b'{"prompt": ["x", "y"], "n": 200}', "sequences"),
        ("completions", b'{"prompt": "x", "logprobs": 21}', "logprobs is 21"),
        ("completions", b'{"prompt": "x", "stop": ["a", ""]}', "stop holds an empty string"),
        ("completions", b'{"prompt": "x", "echo": true}', "echo is not supported"),
        ("completions", b'{"prompt": "x", "min_p": 0.1}', "min_p is not supported"),
        ("completions", b'{"prompt": "x", "stream_options": {}}', "needs stream: true"),
        ("chat/completions", b"{}", "messages is missing"),
        ("chat/completions", b'{"messages": [{}]}', "messages[0].role"),
        ("chat/completions", b'{"messages": [1]}', "messages[0]: expected object"),
        (
            "chat/completions",
            b'{"messages": [{"role": "user", "content": 1}]}',
            "content is neither",
        ),
        ("chat/completions", b'{"messages": [{"role": "u"}], "top_logprobs": 1}', "logprobs: true"),
        ("chat/completions", b'{"messages": [{"role": "u"}], "tools": [{}]}', "tools is not supp"),
        (
            "chat/completions",
            b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "messages[0].content[0] is of type 'image_url'",
        ),
    ],
)
async def test_a_bad_body_is_one_clear_400(
    connect: Connect, path: str, body: bytes, message: str
) -> None:
    client = await connect(FakeEngine())
    async with client.http.post(f"/v1/{path}", data=body) as response:
        error = (await response.json())["error"]
    assert response.status == error["code"] == 400
    assert error["type"] == "BadRequestError"
    assert message in error["message"]
    assert client.engine.requests == []


async def test_unknown_models_routes_and_methods(connect: Connect) -> None:
    client = await connect(FakeEngine())
    status, message, param = await client.refused({"model": "gpt", "prompt": "x"})
    assert (status, param) == (404, "model")
    assert message == "the model 'gpt' does not exist: this engine serves tiny, alias"
    for method, path, expected in (("GET", "/%FF", 404), ("GET", "/v1/completions", 405)):
        async with client.http.request(method, path) as response:
            assert response.status == (await response.json())["error"]["code"] == expected
    assert response.headers["Allow"] == "POST"


async def test_a_body_that_is_too_large(connect: Connect) -> None:
    client = await connect(FakeEngine(), body_limit=100)
    status, message, _ = await client.refused({"prompt": "x" * 100})
    assert (status, message) == (413, "the request body is larger than 100 bytes")


@pytest.mark.parametrize("sent_id", ["ümlaut", "x" * 600])
async def test_an_unusable_request_id_is_replaced(connect: Connect, sent_id: str) -> None:
    client = await connect(FakeEngine(answer_with("x")))
    _, answer = await client.post(
        "/v1/completions", {"prompt": "x"}, headers={"X-Request-Id": sent_id}
    )
    assert answer["id"].startswith("cmpl-")
    assert answer["id"].isascii()
    assert len(client.engine.requests[0].request_id) <= MAX_ID


async def test_draining_lets_requests_finish_and_takes_no_new_ones(connect: Connect) -> None:
    client = await connect(FakeEngine())
    running = asyncio.create_task(client.complete())
    await client.engine.submitted.wait()
    drained = asyncio.create_task(client.server.drain(60))
    async with client.http.get("/health") as response:
        assert response.status == 503
    assert (await client.refused({"prompt": "x"}))[0] == 503
    client.engine.generations[0].say(Delta(token_ids=(97,), finish_reason="stop"))
    assert (await running)["choices"][0]["text"] == "a"
    assert await drained


async def test_a_drain_waits_for_the_readers_of_held_kv(connect: Connect) -> None:
    client = await connect(FakeEngine())
    client.engine.nothing_held.clear()
    assert not await client.server.drain(0)
    drained = asyncio.create_task(client.server.drain(60))
    async with client.http.get("/health") as response:
        assert response.status == 503
    assert not drained.done()
    client.engine.nothing_held.set()
    assert await drained


async def test_past_its_time_limit_a_drain_ends_requests_with_an_error(connect: Connect) -> None:
    client = await connect(FakeEngine())
    streamed = await _first_token(client)
    whole = asyncio.create_task(client.refused({"prompt": "x"}))
    client.engine.submitted.clear()
    await client.engine.submitted.wait()
    assert not await client.server.drain(0)
    assert (await whole)[0] == 503
    text = await streamed.text()
    assert "shutting down" in text
    assert "[DONE]" not in text


async def _first_token(client: Client) -> aiohttp.ClientResponse:
    post = asyncio.ensure_future(
        client.http.post("/v1/completions", json={"prompt": "x", "stream": True})
    )
    await client.engine.submitted.wait()
    client.engine.generations[0].say(Delta(token_ids=(97,)))
    return await post


async def test_health_follows_the_engine(connect: Connect) -> None:
    client = await connect(FakeEngine())
    async with client.http.get("/health") as response:
        assert (response.status, await response.read()) == (200, b"")
    client.engine.healthy = False
    async with client.http.get("/health") as response:
        assert response.status == 503


async def test_model_list_version_and_tokenizing(connect: Connect) -> None:
    client = await connect(FakeEngine())
    async with client.http.get("/v1/models") as response:
        models = await response.json()
    assert [model["id"] for model in models["data"]] == ["tiny", "alias"]
    assert models["data"][0]["max_model_len"] == 64
    async with client.http.get("/version") as response:
        assert (await response.json())["version"]
    assert await client.post("/tokenize", {"prompt": "ab", "return_token_strs": True}) == (
        200, {"count": 2, "max_model_len": 64, "tokens": [97, 98], "token_strs": ["a", "b"]},
    )  # fmt: skip
    _, chat = await client.post("/tokenize", {"messages": [{"role": "user", "content": "a"}]})
    assert chat["tokens"] == [256, *b"user: a\nassistant:"]
    assert await client.post("/detokenize", {"tokens": [256, 97]}) == (200, {"prompt": "<s>a"})
    assert (await client.refused({"tokens": [-1]}, "/detokenize"))[0] == 400
    assert (await client.refused({}, "/tokenize"))[0] == 400
    assert (await client.refused({"prompt": "a", "model": "b"}, "/tokenize"))[0] == 404


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    connect: Connect, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await connect(FakeEngine(answer_with("world")))
    tokenized: list[int] = []
    encode = Tokenizer.encode

    def recorded(self: Tokenizer, text: str, **options: bool) -> tuple[int, ...]:
        tokenized.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", recorded)
    limit = model.max_model_len * model.tokenizer.sizes.longest
    long = "x" * (limit + 1)
    chat = "/v1/chat/completions"
    for path, body in (
        ("/v1/completions", {"prompt": long}),
        ("/v1/completions", {"prompt": ["short", long]}),
        (chat, {"messages": [{"role": "user", "content": long}]}),
        (chat, {"messages": [{"role": "user", "content": "x"}] * (limit // 4)}),
        ("/tokenize", {"prompt": long}),
    ):
        status, message, _ = await client.refused(body, path)
        assert status == 400
        assert message.startswith("This model's maximum context length is 64 tokens")
    assert tokenized == [len("short")]
    # The longest text that might fit is counted in tokens.
    assert "the prompt has" in (await client.refused({"prompt": long[1:]}))[1]
    assert tokenized == [len("short"), limit]
