"""Prefill answers without usable parameters, or with those of another prompt's KV."""

from typing import Any

import msgspec
import pytest

from tandem_contract import metrics, transfer_params

from .altering_proxy import Change, Params, altering_proxy
from .client import ask, members_of
from .engine import Engine
from .pair import FALLBACK, SPLIT, call, expected_tokens, start_pair

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]


def with_(**changes: Any) -> Change:
    async def change(params: Params) -> Params:
        return params | changes

    return change


async def no_params(_: Params) -> Params | None:
    return None


async def fewer_blocks(params: Params) -> Params:
    return params | {"remote_block_ids": [params["remote_block_ids"][0][:-1]]}


@pytest.mark.parametrize(
    "change", [no_params, with_(do_remote_prefill=False), with_(remote_host=None)]
)
async def test_an_answer_without_usable_params_falls_back(
    decode: Engine, second_prefill: Engine, change: Change
) -> None:
    request = call(20)
    async with altering_proxy(second_prefill, change) as proxy, start_pair(decode) as pair:
        result = await pair.ask(request, proxy.address)
        assert (result.status, result.path, result.tokens) == (
            200,
            FALLBACK.value,
            expected_tokens(request),
        )
        assert await pair.errors() == {"kv_transfer": 1}
        await pair.wait_until_idle(decode, second_prefill)


@pytest.mark.parametrize(
    "change",
    [
        fewer_blocks,
        with_(remote_request_id="another's"),
        with_(remote_engine_id="one that is gone"),
        with_(remote_port=1),
    ],
)
async def test_kv_that_cannot_be_read_is_recomputed_and_counted(
    decode: Engine, second_prefill: Engine, change: Change
) -> None:
    request = call(21)
    failed = await decode.figure(metrics.ENGINE_XFER_FAILED)
    async with altering_proxy(second_prefill, change) as proxy, start_pair(decode) as pair:
        # From here on its counters are compared with their values at this moment.
        assert await pair.errors() == {}
        result = await pair.ask(request, proxy.address)
        assert (result.status, result.path, result.tokens) == (
            200,
            SPLIT.value,
            expected_tokens(request),
        )
        assert await decode.figure(metrics.ENGINE_XFER_FAILED) == failed + 1
        await pair.wait_for_errors(kv_transfer=1)
        await pair.wait_until_idle(decode, second_prefill)


async def test_kv_of_another_prompt_is_never_read(decode: Engine, second_prefill: Engine) -> None:
    """Both prompts have the same length, and the other's KV could really be read."""
    request, other_request = call(22), call(23)
    received: list[Params] = []

    async def swapped(params: Params) -> Params:
        received.append(params)
        return received[0]

    async with altering_proxy(second_prefill, swapped) as proxy, start_pair(decode) as pair:
        assert await pair.errors() == {}
        body = members_of(other_request) | {
            transfer_params.FIELD: msgspec.json.decode(transfer_params.PREFILL_LEG)
        }
        async with pair.http.post(f"{second_prefill.url}{other_request.path}", json=body) as answer:
            received.append((await answer.json())[transfer_params.FIELD])
        result = await pair.ask(request, proxy.address)
        assert (result.status, result.path, result.tokens) == (
            200,
            FALLBACK.value,
            expected_tokens(request),
        )
        assert await pair.errors() == {"kv_transfer": 1}
        assert (await ask(pair.http, decode.url, other_request)).tokens == expected_tokens(
            other_request
        )
        await pair.wait_until_idle(decode, second_prefill)


@pytest.mark.parametrize("fallback", [True, False])
async def test_a_contradiction_between_the_legs_is_not_the_clients(
    decode: Engine, second_prefill: Engine, fallback: bool
) -> None:
    """Such as that of chat templates that differ: the decode engine reads the client's prompt."""
    request = call(24)
    flags = () if fallback else ("--no-fallback-to-unified",)
    async with (
        altering_proxy(second_prefill, with_(remote_num_tokens=99)) as proxy,
        start_pair(decode, *flags) as pair,
    ):
        result = await pair.ask(request, proxy.address)
        assert result.status == (200 if fallback else 400)
        assert await pair.errors() == {"kv_transfer": 1}
        await pair.wait_until_idle(decode, second_prefill)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_sends_another_prompt_to_the_decode_engine_is_refused(
    decode: Engine, second_prefill: Engine, stream: bool
) -> None:
    """Two legs that a client sends itself, the second with `prompt: "ignored"`."""
    request = call(25)
    async with start_pair(decode) as pair:
        leg = {transfer_params.FIELD: msgspec.json.decode(transfer_params.PREFILL_LEG)}
        body = members_of(request)
        async with pair.http.post(f"{second_prefill.url}{request.path}", json=body | leg) as answer:
            params = (await answer.json())[transfer_params.FIELD]
        body |= {"prompt": "ignored", "stream": stream, transfer_params.FIELD: params}
        async with pair.http.post(f"{decode.url}{request.path}", json=body) as answer:
            error = (await answer.json())["error"]
        assert (answer.status, error["param"]) == (400, transfer_params.FIELD)
        assert "Send the prompt that the prefill engine was sent" in error["message"]
        await pair.wait_until_idle(decode, second_prefill)
