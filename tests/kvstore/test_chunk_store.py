"""Chunks written to each kind of store, and read back verified."""

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
import safetensors

from tandem_kvstore.chunk_store import Outcome
from tandem_kvstore.errors import ObjectMissing, Reason
from tandem_kvstore.format.manifest import MAX_INLINE, key_of
from tandem_kvstore.format.tensors import Buffer
from tandem_kvstore.stores.files import FileStore

from .kv import IDENTITY, chain, engine, group_specs, layer_groups
from .servers import Server, file_store

pytestmark = pytest.mark.component


@pytest.mark.parametrize("max_inline", [0, MAX_INLINE])
async def test_a_chain_of_chunks_is_read_back_as_it_was_written(
    server: Server, max_inline: int
) -> None:
    chunks, writer = chain(1, 5), engine(server.location, max_inline=max_inline)
    await writer.put_all(chunks)
    reader = engine(server.location)
    manifests, outcome = await reader.chunks.find(chunks)
    assert outcome == Outcome(5)
    for load in (
        reader.chunks.load(manifests, group_specs(), reader.deliver),
        reader.chunks.fetch(chunks, group_specs(), reader.deliver),
    ):
        loaded = await load
        assert (loaded.chunks, loaded.reason) == (5, None)
        reader.assert_delivered(chunks)
        reader.delivered.clear()
    await writer.chunks.close()
    await reader.chunks.close()


async def test_a_chain_is_used_as_far_as_it_goes(server: Server) -> None:
    chunks, client = chain(1, 10), engine(server.location)
    await client.put_all([*chunks[:7], chunks[8]])
    fetched = await client.chunks.fetch(chunks, group_specs(), client.deliver)
    assert (fetched.chunks, fetched.reason) == (7, Reason.MISSING)
    manifests, outcome = await client.chunks.find(chunks)
    assert outcome == Outcome(7, Reason.MISSING)
    assert (await client.chunks.load(manifests, group_specs(), client.deliver)).chunks == 7
    client.assert_delivered(chunks[:7])
    await client.chunks.close()


async def test_an_empty_store_has_nothing(server: Server) -> None:
    client = engine(server.location)
    assert await client.chunks.find(chain(1, 3)) == ([], Outcome(0, Reason.MISSING))
    assert [info async for info in client.objects.scan()] == []
    await client.chunks.close()


async def test_the_object_of_the_prefix_hash_is_the_manifest(server: Server) -> None:
    (chunk,), client = chain(1, 1), engine(server.location)
    await client.put_all([chunk])
    reference = client.chunks.reference(chunk)
    assert reference.path == f"{server.location.namespace}/{chunk.key}"
    manifest = json.loads((server.directory / chunk.key).read_bytes())["manifest"]
    assert manifest["prefix_hash"] == chunk.key
    names = [info.name async for info in client.objects.scan()]
    assert [name for name in names if key_of(name) == name] == [chunk.key]
    assert {key_of(name) for name in names} == {chunk.key}
    assert len(names) == 3
    await client.chunks.close()


async def test_data_objects_are_safetensors(server: Server) -> None:
    (chunk,), client = chain(1, 1), engine(server.location)
    await client.put_all([chunk])
    (file,) = server.directory.glob(f"{chunk.key}-00-*")
    tensors = dict(safetensors.deserialize(file.read_bytes()))
    stored = layer_groups(chunk)[0]
    assert [bytes(tensors[spec.name]["data"]) for spec in stored.specs] == list(stored.parts)
    await client.chunks.close()


async def test_two_writers_of_one_chunk_are_never_mixed(server: Server) -> None:
    # Their KV differs bitwise: other batch sizes, other GPUs.
    chunks, first, second = chain(1, 4), engine(server.location), engine(server.location)
    await asyncio.gather(first.put_all(chunks, writer=1), second.put_all(chunks, writer=2))
    manifests, _ = await first.chunks.find(chunks)
    assert (await first.chunks.load(manifests, group_specs(), first.deliver)).chunks == 4
    first.assert_delivered(chunks, writers=(1, 2))
    await first.chunks.close()
    await second.chunks.close()


async def test_the_second_writer_learns_that_it_was_second(server: Server) -> None:
    (chunk,), client = chain(1, 1), engine(server.location)
    assert await client.chunks.put(chunk, layer_groups(chunk))
    assert not await client.chunks.put(chunk, layer_groups(chunk, writer=2))
    await client.chunks.close()


async def test_a_small_chunk_is_one_object(server: Server) -> None:
    (chunk,), client = chain(1, 1), engine(server.location, max_inline=MAX_INLINE)
    await client.put_all([chunk])
    assert [info.name async for info in client.objects.scan()] == [chunk.key]
    # A look-up does not take the data.
    cut = await client.objects.get(chunk.key, 100, is_cut=True)
    assert memoryview(cut).nbytes == 100
    assert await client.chunks.has(chunk)
    await client.chunks.close()


@pytest.mark.parametrize(
    ("end", "reason"), [(-1, Reason.TRUNCATED), (-16_000, Reason.TRUNCATED), (60, Reason.CORRUPT),
                        (0, Reason.CORRUPT)],
)  # fmt: skip
async def test_a_small_chunk_that_was_cut_off_is_refused_and_replaced(
    server: Server, end: int, reason: Reason
) -> None:
    chunks, client = chain(1, 2), engine(server.location, max_inline=MAX_INLINE)
    await client.put_all(chunks)
    file = server.directory / chunks[1].key
    file.write_bytes(file.read_bytes()[:end])
    outcome = await client.chunks.fetch(chunks, group_specs(), client.deliver)
    assert (outcome.chunks, outcome.reason) == (1, reason)
    assert await client.chunks.put(chunks[1], layer_groups(chunks[1], writer=2))
    assert (await client.chunks.fetch(chunks, group_specs(), client.deliver)).chunks == 2
    client.assert_delivered(chunks, writers=(0, 2))
    await client.chunks.close()


async def test_an_inline_chunk_that_is_too_long_is_replaced(server: Server) -> None:
    (chunk,), client = chain(1, 1), engine(server.location, max_inline=MAX_INLINE)
    await client.put_all([chunk])
    with (server.directory / chunk.key).open("ab") as file:
        file.write(bytes(2 * MAX_INLINE))
    outcome = await client.chunks.fetch([chunk], group_specs(), client.deliver)
    assert outcome == Outcome(0, Reason.CORRUPT)
    assert await client.chunks.put(chunk, layer_groups(chunk, writer=2))
    assert (await client.chunks.fetch([chunk], group_specs(), client.deliver)).chunks == 1
    await client.chunks.close()


async def test_the_info_of_an_object_is_its_line_of_the_listing(server: Server) -> None:
    client = engine(server.location)
    await client.objects.put("name", (b"four",))
    [listed] = [entry async for entry in client.objects.scan()]
    info = await client.objects.info("name")
    assert (info.name, info.size) == (listed.name, listed.size) == ("name", 4)
    assert abs(info.modified - listed.modified) <= 1.0
    with pytest.raises(ObjectMissing):
        await client.objects.info("another")
    await client.chunks.close()


async def test_an_empty_object_that_a_look_up_finds_is_replaced(server: Server) -> None:
    (chunk,), client = chain(1, 1), engine(server.location)
    await client.put_all([chunk])
    (server.directory / chunk.key).write_bytes(b"")
    assert (await client.chunks.find([chunk]))[1] == Outcome(0, Reason.CORRUPT)
    assert await client.chunks.put(chunk, layer_groups(chunk, writer=2))
    assert (await client.chunks.fetch([chunk], group_specs(), client.deliver)).chunks == 1
    await client.chunks.close()


async def test_a_bit_of_a_small_chunks_data_that_changed_is_found(server: Server) -> None:
    chunks, client = chain(1, 3), engine(server.location, max_inline=MAX_INLINE)
    await client.put_all(chunks)
    file = server.directory / chunks[1].key
    data = bytearray(file.read_bytes())
    data[-7] ^= 4
    file.write_bytes(data)
    outcome = await client.chunks.fetch(chunks, group_specs(), client.deliver)
    assert (outcome.chunks, outcome.reason) == (1, Reason.CORRUPT)
    client.assert_delivered(chunks[:1])
    assert (1, "01") not in client.delivered
    await client.chunks.close()


async def test_an_engine_of_another_identity_finds_nothing(server: Server) -> None:
    other = msgspec.structs.replace(IDENTITY, weights="another commit")
    writer, reader = engine(server.location), engine(server.location, other)
    await writer.put_all(chain(1, 2))
    assert await reader.chunks.find(chain(1, 2, other)) == ([], Outcome(0, Reason.MISSING))
    await writer.chunks.close()
    await reader.chunks.close()


async def test_manifests_are_looked_up_in_batches_after_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks, client, get = chain(1, 40), engine(file_store(tmp_path).location), FileStore.get
    await client.put_all(chunks)
    asked: list[str] = []
    batches: list[int] = []

    async def gated_get(store: FileStore, name: str, limit: int, *, is_cut: bool = False) -> Buffer:
        asked.append(name)
        # All that is asked for at once is asked for before the first answer.
        for _ in range(100):
            await asyncio.sleep(0)
        if asked:
            batches.append(len(asked))
            asked.clear()
        return await get(store, name, limit, is_cut=is_cut)

    monkeypatch.setattr(FileStore, "get", gated_get)
    assert (await client.chunks.find(chunks))[1] == Outcome(40)
    assert batches == [1, 32, 7]
    batches.clear()
    # A prompt that is not stored costs one request.
    assert (await client.chunks.find(chain(2, 40)))[1] == Outcome(0, Reason.MISSING)
    assert batches == [1]
    await client.chunks.close()
