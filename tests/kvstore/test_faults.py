"""Wrong objects in a store: each is found before its bytes reach an engine, and computed instead.

The first tests are named after what users of other stores for KV report.
"""

import os
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tandem_kvstore.chunk_store import Chunk, ChunkStore
from tandem_kvstore.errors import Reason
from tandem_kvstore.format.manifest import decode_manifest, encode_manifest

from .kv import IDENTITY, Engine, chain, client, engine, group_specs, layer_groups
from .servers import Server, file_store

pytestmark = pytest.mark.component

Fault = Callable[[Server, list[Chunk]], None]


def data_file(server: Server, chunk: Chunk, group: str = "00") -> Path:
    (file,) = server.directory.glob(f"{chunk.key}-{group}-*")
    return file


def edit_manifest(server: Server, chunk: Chunk, **changes: object) -> None:
    """Replace fields of a manifest, with a correct checksum."""
    file = server.directory / chunk.key
    manifest = decode_manifest(
        file.read_bytes(), chunk.key, IDENTITY.digest(), chunk.previous, chunk.token_count
    )
    file.write_bytes(encode_manifest(msgspec.structs.replace(manifest, **changes)))


def corrupt_one_bit(server: Server, chunks: list[Chunk]) -> None:
    file = data_file(server, chunks[3], "01")
    data = bytearray(file.read_bytes())
    data[-7] ^= 4
    file.write_bytes(data)


def serve_another_requests_data(server: Server, chunks: list[Chunk]) -> None:
    file = data_file(server, chunks[3])
    file.write_bytes(data_file(server, chunks[5]).read_bytes())


def serve_another_requests_manifest(server: Server, chunks: list[Chunk]) -> None:
    file = server.directory / chunks[3].key
    file.write_bytes((server.directory / chunks[5].key).read_bytes())


def lengthen(server: Server, chunks: list[Chunk]) -> None:
    with data_file(server, chunks[3]).open("ab") as file:
        file.write(b"more")


def truncate(server: Server, chunks: list[Chunk]) -> None:
    file = data_file(server, chunks[3])
    os.truncate(file, file.stat().st_size - 1)


def lose_a_data_object(server: Server, chunks: list[Chunk]) -> None:
    data_file(server, chunks[3]).unlink()


def lose_a_manifest(server: Server, chunks: list[Chunk]) -> None:
    (server.directory / chunks[3].key).unlink()


def damage_a_manifest(server: Server, chunks: list[Chunk]) -> None:
    file = server.directory / chunks[3].key
    file.write_bytes(file.read_bytes().replace(b'"token_count":128', b'"token_count":129'))


def flip_the_high_bit_of_a_character(server: Server, chunks: list[Chunk]) -> None:
    file = server.directory / chunks[3].key
    data = bytearray(file.read_bytes())
    data[len(b'{"checksum":"')] |= 0x80
    file.write_bytes(data)


def nest_a_manifest_deeply(server: Server, chunks: list[Chunk]) -> None:
    depth = 20_000
    (server.directory / chunks[3].key).write_bytes(
        b'{"checksum":"","manifest":' + b"[" * depth + b"]" * depth + b"}"
    )


def change_the_models_revision(server: Server, chunks: list[Chunk]) -> None:
    other = msgspec.structs.replace(IDENTITY, weights="another commit")
    edit_manifest(server, chunks[3], identity=other.digest())


def change_the_layout(server: Server, chunks: list[Chunk]) -> None:
    other = msgspec.structs.replace(IDENTITY, layout="block,token,kv,head,dim")
    edit_manifest(server, chunks[3], identity=other.digest())


def write_an_older_format(server: Server, chunks: list[Chunk]) -> None:
    edit_manifest(server, chunks[3], format="tandem-kv/0")


def drop_a_layer_group(server: Server, chunks: list[Chunk]) -> None:
    file = server.directory / chunks[3].key
    chunk = chunks[3]
    manifest = decode_manifest(
        file.read_bytes(), chunk.key, IDENTITY.digest(), chunk.previous, chunk.token_count
    )
    edit_manifest(server, chunk, data=manifest.data[:1])


FAULTS = [
    pytest.param(corrupt_one_bit, Reason.CORRUPT, id="no-checksum-by-default"),
    pytest.param(serve_another_requests_data, Reason.CORRUPT, id="another-requests-kv-served"),
    pytest.param(serve_another_requests_manifest, Reason.SWAPPED, id="another-requests-manifest"),
    pytest.param(truncate, Reason.TRUNCATED, id="gibberish-after-a-failed-store"),
    pytest.param(lengthen, Reason.CORRUPT, id="data-longer-than-the-manifest-says"),
    pytest.param(lose_a_data_object, Reason.MISSING, id="data-lost-behind-its-manifest"),
    pytest.param(lose_a_manifest, Reason.MISSING, id="manifest-lost"),
    pytest.param(damage_a_manifest, Reason.CORRUPT, id="manifest-damaged"),
    pytest.param(flip_the_high_bit_of_a_character, Reason.CORRUPT, id="manifest-is-no-utf-8"),
    pytest.param(nest_a_manifest_deeply, Reason.CORRUPT, id="manifest-nested-deeply"),
    pytest.param(change_the_models_revision, Reason.FOREIGN, id="key-without-the-models-revision"),
    pytest.param(change_the_layout, Reason.FOREIGN, id="layout-changed-under-the-cache"),
    pytest.param(write_an_older_format, Reason.FORMAT, id="older-format"),
    pytest.param(drop_a_layer_group, Reason.FOREIGN, id="other-layer-groups"),
]


@pytest.mark.parametrize(("fault", "reason"), FAULTS)
async def test_a_wrong_object_ends_the_prefix_and_is_replaced(
    server: Server, fault: Fault, reason: Reason
) -> None:
    chunks = chain(1, 6)
    writer = engine(server.location)
    await writer.put_all(chunks)
    await writer.chunks.close()
    fault(server, chunks)
    reader, behind, counts = client(server.location)
    result = await reader.load(chunks, group_specs(), behind.deliver, context=0)
    assert (result.chunks, result.reason) == (3, reason)
    assert counts.not_loaded == {reason: 3}
    behind.assert_delivered(chunks[:3])
    # A store that answers is healthy, whatever it answers.
    assert reader.guard.breaker.allows
    # The prompt was computed: the engine stores the chunk again, and it can be used again.
    assert await reader.store(chunks[3], layer_groups(chunks[3], writer=7))
    again = await reader.load(chunks, group_specs(), behind.deliver, context=0)
    assert (again.chunks, again.reason) == (6, None)
    behind.assert_delivered(chunks, writers=(0, 7))
    await reader.close()


async def test_random_damage_never_reaches_an_engine(tmp_path: Path) -> None:
    server, chunks, source = file_store(tmp_path), chain(1, 3), random.Random(18)
    writer = engine(server.location)
    await writer.put_all(chunks)
    originals = {file: file.read_bytes() for file in server.directory.iterdir()}
    files = sorted(originals)
    for _ in range(300):
        file = source.choice(files)
        file.write_bytes(damaged(source, originals[file], originals[source.choice(files)]))
        reader = engine(server.location)
        manifests, _ = await reader.chunks.find(chunks)
        loaded = await reader.chunks.load(manifests, group_specs(), reader.deliver)
        reader.assert_delivered(chunks[: loaded.chunks])
        # Groups of a chunk that is incomplete are right, too: none was delivered unverified.
        assert_all_right(reader, chunks)
        file.write_bytes(originals[file])


def damaged(source: random.Random, data: bytes, other: bytes) -> bytes:
    match source.randrange(5):
        case 0:
            at, bit = source.randrange(len(data)), 1 << source.randrange(8)
            return data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
        case 1:
            return data[: source.randrange(len(data))]
        case 2:
            return data + source.randbytes(source.randrange(1, 100))
        case 3:
            at = source.randrange(len(data))
            return data[:at] + bytes(min(64, len(data) - at)) + data[at + 64 :]
        case _:
            return other


def assert_all_right(reader: Engine, chunks: list[Chunk]) -> None:
    for (index, name), tensors in reader.delivered.items():
        (group,) = [g for g in layer_groups(chunks[index]) if g.name == name]
        assert tensors == list(group.parts)


async def test_a_write_that_fails_in_the_middle_is_invisible(server: Server) -> None:
    (chunk,), client_ = chain(1, 1), engine(server.location)

    class HalfStore:
        """Fails with the second data object, as a process that is killed there."""

        def __init__(self) -> None:
            self.puts = 0

        def __getattr__(self, name: str) -> object:
            return getattr(client_.objects, name)

        async def put(self, name: str, parts: list[bytes]) -> None:
            self.puts += 1
            if self.puts == 2:
                raise ConnectionResetError
            await client_.objects.put(name, parts)

    half = ChunkStore(HalfStore(), server.location, IDENTITY, max_inline=0)  # type: ignore[arg-type]
    with pytest.raises(ConnectionResetError):
        await half.put(chunk, layer_groups(chunk))
    assert (await client_.chunks.find([chunk]))[0] == []
    # What it left does not hinder the next writer.
    assert await client_.chunks.put(chunk, layer_groups(chunk, writer=2))
    manifests, _ = await client_.chunks.find([chunk])
    assert (await client_.chunks.load(manifests, group_specs(), client_.deliver)).chunks == 1
    client_.assert_delivered([chunk], writers=(2,))
    await client_.chunks.close()


async def test_a_failing_delivery_ends_the_load_with_no_task_left(tmp_path: Path) -> None:
    server, chunks = file_store(tmp_path), chain(1, 4)
    reader, behind, counts = client(server.location)
    await behind.put_all(chunks)

    async def deliver(index: int, group: str, tensors: list[memoryview]) -> None:
        if index == 2:
            raise ZeroDivisionError
        await behind.deliver(index, group, tensors)

    result = await reader.load(chunks, group_specs(), deliver, context=0)
    assert (result.chunks, result.reason) == (2, Reason.OTHER)
    assert counts.not_loaded == {Reason.OTHER: 2}
    await reader.close()
