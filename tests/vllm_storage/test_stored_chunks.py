"""Which chunks an engine believes stored, and the KV events that it publishes."""

import pytest

from tandem_kvstore.chunk_store import Chunk
from tandem_kvstore.errors import Reason
from tandem_vllm_storage.stored_chunks import BlocksRemoved, BlocksStored, StoredChunks

BLOCKS = BlocksStored([b"1", b"2"], None, [1, 2, 3, 4], 2)
CHUNK = Chunk("a", "", 4)


def saved(ranks: int = 1) -> StoredChunks:
    chunks = StoredChunks()
    chunks.add_saving("a", BLOCKS, ranks)
    return chunks


def test_a_chunk_is_published_when_all_workers_have_stored_it() -> None:
    chunks = saved(ranks=2)
    assert not chunks.end_save("a", is_stored=True)
    assert chunks.take_events() == []
    assert chunks.before_saving([CHUNK]) == []
    assert chunks.end_save("a", is_stored=True)
    assert chunks.take_events() == [BLOCKS]
    assert chunks.take_events() == []
    assert not chunks.is_saving


@pytest.mark.parametrize("results", [(True, False), (False, True)])
def test_a_chunk_of_which_a_part_is_missing_is_not_published(results: tuple[bool, bool]) -> None:
    chunks = saved(ranks=2)
    for result in results:
        assert "a" in chunks
        assert not chunks.end_save("a", is_stored=result)
    assert chunks.take_events() == []
    assert "a" not in chunks


def test_what_another_engine_stored_is_published_once() -> None:
    chunks = StoredChunks()
    chunks.add_found("a", lambda: BLOCKS)
    chunks.add_found("a", lambda: BLOCKS)
    assert chunks.take_events() == [BLOCKS]


@pytest.mark.parametrize("reason", [Reason.MISSING, Reason.CORRUPT])
def test_a_chunk_that_is_gone_is_withdrawn(reason: Reason) -> None:
    chunks = saved()
    chunks.end_save("a", is_stored=True)
    chunks.remove_lost([CHUNK], reason, chunks.clock)
    assert chunks.take_events() == [BLOCKS, BlocksRemoved([b"1", b"2"])]
    assert "a" not in chunks


@pytest.mark.parametrize("reason", [None, Reason.TIMEOUT, Reason.UNAVAILABLE])
def test_a_store_that_does_not_answer_still_has_its_chunks(reason: Reason | None) -> None:
    chunks = saved()
    chunks.end_save("a", is_stored=True)
    chunks.remove_lost([CHUNK], reason, chunks.clock)
    assert chunks.take_events() == [BLOCKS]


def test_a_chunk_that_is_being_written_is_not_lost() -> None:
    chunks = saved()
    chunks.remove_lost([CHUNK], Reason.MISSING, chunks.clock)
    assert chunks.end_save("a", is_stored=True)
    assert chunks.take_events() == [BLOCKS]


def test_a_chunk_whose_save_ended_after_the_look_up_began_is_not_lost() -> None:
    chunks = saved()
    began = chunks.clock
    assert chunks.end_save("a", is_stored=True)
    chunks.remove_lost([CHUNK], Reason.MISSING, began)
    assert chunks.take_events() == [BLOCKS]
    assert "a" in chunks

    chunks.remove_lost([CHUNK], Reason.MISSING, chunks.clock)
    assert chunks.take_events() == [BlocksRemoved([b"1", b"2"])]


def test_a_chunk_that_was_deleted_is_withdrawn() -> None:
    chunks = saved()
    chunks.end_save("a", is_stored=True)
    chunks.on_deleted(["a", "unknown"])
    assert chunks.take_events() == [BLOCKS, BlocksRemoved([b"1", b"2"])]


def test_without_events_chunks_are_remembered_all_the_same() -> None:
    chunks = StoredChunks()
    chunks.add_saving("a", None, 1)
    assert chunks.end_save("a", is_stored=True)
    chunks.add_found("b", lambda: None)
    assert "a" in chunks
    assert "b" in chunks
    assert chunks.take_events() == []
