"""Which engines move KV with each other: real producers and pullers, with and without keys."""

import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tandem_contract.peer_handshake import Handshake
from tandem_contract.plan import load_keys
from tandem_contract.plan_keys import PlanKeys
from tandem_contract.transfer_params import TransferParams
from tandem_engine.transfer import trust, wire
from tandem_engine.transfer.producer import Producer
from tandem_engine.transfer.puller import Puller
from tandem_engine.transfer.trust import Trust
from tandem_engine.types import KvRefused

from .support import ENGINE, HOST, LAYOUT, Freed, cache, connected, finish, hello, params, read

THERE, HERE = [4, 5, 2], [9, 3, 4]
OLD, NEW = "20260101T000000Z", "20260102T000000Z"


def trusting(directory: Path | None) -> Trust:
    return Trust(PlanKeys(directory))


def write_keys(directory: Path, *names: str, secret: str = "a secret of sixteen bytes") -> Path:
    directory.mkdir(exist_ok=True)
    for file in directory.iterdir():
        file.unlink()
    for name in names:
        (directory / name).write_text(f"{secret} {name}")
    return directory


@asynccontextmanager
async def pair(
    producers: Path | None, pullers: Path | None
) -> AsyncIterator[tuple[Puller, TransferParams]]:
    """A puller, and the parameters that a producer writes for a prompt that it holds."""
    async with AsyncExitStack() as stack:
        own = trusting(producers)
        producer = Producer(cache(1), LAYOUT, ENGINE, HOST, 0, 60.0, Freed(), trust=own)
        await producer.start()
        stack.push_async_callback(producer.close)
        finish(producer, "r", THERE, LAYOUT)
        puller = Puller(cache(2), LAYOUT, trust=trusting(pullers))
        stack.push_async_callback(puller.close)
        proof = own.producer_proof(ENGINE, *producer.address)
        yield puller, replace(params(producer.address), tandem_producer_proof=proof)


async def pull(puller: Puller, source: TransferParams) -> int:
    return (await puller.pull(source, HERE, 0, 12)).tokens


async def test_engines_with_a_common_key_move_kv(tmp_path: Path) -> None:
    async with pair(write_keys(tmp_path / "p", OLD, NEW), write_keys(tmp_path / "d", OLD)) as (
        puller,
        source,
    ):
        # The producer signs with the newer key, which the reader has mounted a moment later.
        with pytest.raises(KvRefused, match="tandem_producer_proof"):
            await pull(puller, source)
    keys = write_keys(tmp_path / "p", OLD, NEW)
    async with pair(keys, keys) as (puller, source):
        assert await pull(puller, source) == 12


async def test_a_rotation_needs_no_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_RELOAD_SECONDS", 0.0)
    keys = write_keys(tmp_path / "keys", OLD)
    async with pair(keys, keys) as (puller, source):
        write_keys(keys, OLD, NEW)
        assert await pull(puller, source) == 12
    async with pair(keys, keys) as (puller, source):
        write_keys(keys, NEW)
        assert await pull(puller, source) == 12


async def test_a_reader_without_a_key_learns_nothing(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", OLD)
    async with pair(keys, None) as (puller, source):
        with pytest.raises(KvRefused, match="readers with a transfer key only"):
            await pull(puller, source)
        async with connected((source.remote_host, source.remote_port)) as peer:
            await peer.send(hello(engine_id="guessed"), read(12))
            refused = await peer.from_producer()
            assert isinstance(refused, wire.Refused)
            assert ENGINE not in refused.reason


async def test_a_reader_with_another_secret_is_refused(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "p", OLD)
    guessed = write_keys(tmp_path / "d", OLD, secret="another secret of sixteen")
    async with pair(keys, guessed) as (puller, source):
        # With a proof that the reader itself believes in.
        proof = trusting(guessed).producer_proof(ENGINE, source.remote_host, source.remote_port)
        with pytest.raises(KvRefused, match="another secret"):
            await pull(puller, replace(source, tandem_producer_proof=proof))


async def test_a_producer_without_a_key_is_refused(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "d", OLD)
    async with pair(None, keys) as (puller, source):
        proof = trusting(keys).producer_proof(ENGINE, source.remote_host, source.remote_port)
        with pytest.raises(KvRefused, match="has no --transfer-key-dir"):
            await pull(puller, replace(source, tandem_producer_proof=proof))


@pytest.mark.parametrize("proof", [None, "", "v1.unknown.mac", "other address", "v1.\N{SNOWMAN}.x"])
async def test_no_connection_goes_to_a_host_that_no_producer_has_named(
    tmp_path: Path, proof: str | None
) -> None:
    keys = write_keys(tmp_path / "keys", OLD)
    with socket.create_server((HOST, 0)) as listening:
        listening.setblocking(False)
        host, port = listening.getsockname()
        if proof == "other address":
            proof = trusting(keys).producer_proof(ENGINE, host, port + 1)
        puller = Puller(cache(2), LAYOUT, trust=trusting(keys))
        source = replace(params((host, port)), tandem_producer_proof=proof)
        with pytest.raises(KvRefused, match="tandem_producer_proof"):
            await pull(puller, source)
        await puller.release(source)
        await puller.close()
        with pytest.raises(BlockingIOError):
            listening.accept()


async def test_an_empty_key_directory_trusts_no_one(tmp_path: Path) -> None:
    empty = write_keys(tmp_path / "empty")
    async with pair(empty, empty) as (puller, source):
        with pytest.raises(KvRefused):
            await pull(puller, source)


async def test_kv_of_another_prompt_is_refused() -> None:
    async with pair(None, None) as (puller, source):
        with pytest.raises(KvRefused, match="prompt_hash differs"):
            await pull(puller, replace(source, tandem_prompt_hash="other"))
        with pytest.raises(KvRefused, match="tandem_prompt_hash is missing"):
            await pull(puller, replace(source, tandem_prompt_hash=None))


async def test_a_silent_reader_does_not_count_as_proven(tmp_path: Path) -> None:
    """A stranger who has a reader's first frame gets no further."""
    keys = write_keys(tmp_path / "keys", OLD)
    async with pair(keys, keys) as (_, source):
        address = (source.remote_host, source.remote_port)
        async with connected(address) as peer:
            first = Handshake(b"tandem-kv-transfer", 1).hello("reader", load_keys(keys))
            await peer.send(wire.Hello(wire.VERSION, ENGINE, LAYOUT, first))
            assert isinstance(await peer.from_producer(), wire.Challenged)
            await peer.send(read(12))
            refused = await peer.from_producer()
            assert isinstance(refused, wire.Refused)
            assert "Proven" in refused.reason
