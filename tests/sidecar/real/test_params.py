"""Prefill answers without usable parameters, or with those of another prompt's KV."""

from typing import Any

import msgspec
import pytest

from tandem_contract import metrics, transfer_params

from .asking import ask
from .engine import SERVED, Engine
from .lying import Change, Params, liar
from .pair import FALLBACK, SPLIT, alone, call, paired

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]


def with_(**changes: Any) -> Change:
    async def change(params: Params) -> Params:
        return params | changes

    return change


async def none(_: Params) -> Params | None:
    return None


async def fewer_blocks(params: Params) -> Params:
    return params | {"remote_block_ids": [params["remote_block_ids"][0][:-1]]}


@pytest.mark.parametrize("change", [none, with_(do_remote_prefill=False), with_(remote_host=None)])
async def test_an_answer_without_usable_params_falls_back(
    decode: Engine, second: Engine, change: Change
) -> None:
    it = call(20)
    async with liar(second, change) as lying, paired(decode) as pair:
        told = await pair.ask(it, lying.address)
        assert (told.status, told.path, told.tokens) == (200, FALLBACK.value, alone(it))
        assert await pair.errors() == {"kv_transfer": 1}
        await pair.at_rest(decode, second)


@pytest.mark.parametrize(
    "change",
    [
        fewer_blocks,
        with_(remote_num_tokens=99),
        with_(remote_request_id="another's"),
        with_(remote_engine_id="one that is gone"),
        with_(remote_port=1),
    ],
)
async def test_kv_that_cannot_be_read_is_recomputed_and_counted(
    decode: Engine, second: Engine, change: Change
) -> None:
    it = call(21)
    failed = await decode.figure(metrics.ENGINE_XFER_FAILED)
    async with liar(second, change) as lying, paired(decode) as pair:
        # From here on its counters are compared with their values at this moment.
        assert await pair.errors() == {}
        told = await pair.ask(it, lying.address)
        assert (told.status, told.path, told.tokens) == (200, SPLIT.value, alone(it))
        assert await decode.figure(metrics.ENGINE_XFER_FAILED) == failed + 1
        await pair.counted(kv_transfer=1)
        await pair.at_rest(decode, second)


async def test_kv_of_another_prompt_is_never_read(decode: Engine, second: Engine) -> None:
    """Both prompts have the same length, and the other's KV could really be read."""
    it, other = call(22), call(23)
    kept: list[Params] = []

    async def swapped(params: Params) -> Params:
        kept.append(params)
        return kept[0]

    async with liar(second, swapped) as lying, paired(decode) as pair:
        assert await pair.errors() == {}
        body = other.body(SERVED) | {
            transfer_params.FIELD: msgspec.json.decode(transfer_params.PREFILL_LEG)
        }
        async with pair.http.post(f"{second.url}{other.path}", json=body) as answer:
            kept.append((await answer.json())[transfer_params.FIELD])
        told = await pair.ask(it, lying.address)
        assert (told.status, told.path, told.tokens) == (200, SPLIT.value, alone(it))
        await pair.counted(kv_transfer=1)
        assert (await ask(pair.http, decode.url, other)).tokens == alone(other)
        await pair.at_rest(decode, second)
