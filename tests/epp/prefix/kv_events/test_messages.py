"""Batches of events in the forms that releases of vLLM send."""

from typing import Any

import msgspec
import pytest

from tandem_epp.prefix.kv_events.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    MalformedBatch,
    decode_batch,
)

from .fake_publisher import CLEARED, removed, stored

ARRAY_EVENTS = [
    ["BlockStored", [b"h1"], b"h0", [1, 2, 3, 4], 4, None, "GPU", "sql", [["sql"]], 0, "mamba", 7],
    ["BlockRemoved", [b"h1"], "CPU", 0],
    ["AllBlocksCleared"],
]
"""The form of 0.11 and before, with the members that were added later."""


def test_array_and_map_forms_say_the_same() -> None:
    maps = [
        stored(
            [b"h1"], [1, 2, 3, 4], b"h0", lora_name="sql", extra_keys=[("sql",)],
            kv_cache_spec_kind="mamba", session_id="added later",
        ),
        removed([b"h1"], medium="CPU", locality="LOCAL"),
        CLEARED,
    ]  # fmt: skip
    expected = [
        BlockStored([b"h1"], b"h0", [1, 2, 3, 4], 4, "GPU", "sql", [("sql",)], 0, "mamba"),
        BlockRemoved([b"h1"], "CPU", 0),
        AllBlocksCleared(),
    ]
    for events in (maps, ARRAY_EVENTS):
        for batch in ([5.0, events, 0], [5.0, events], {"ts": 5.0, "events": events}):
            decoded = decode_batch(msgspec.msgpack.encode(batch))
            assert decoded.events == expected
            assert (decoded.timestamp, decoded.unknown) == (5.0, 0)


def test_the_oldest_form_has_no_medium() -> None:
    event = ["BlockStored", [17, 2**63], None, [1, 2], 1, None]
    decoded = decode_batch(msgspec.msgpack.encode([5.0, [event]]))
    assert decoded.events == [BlockStored([17, 2**63], None, [1, 2], 1)]


def test_unknown_types_are_left_out() -> None:
    events = [{"type": "BlockPinned", "block_hashes": 1}, ["BlockPinned", 1], CLEARED]
    decoded = decode_batch(msgspec.msgpack.encode([5.0, events, 0]))
    assert decoded.events == [AllBlocksCleared()]
    assert decoded.unknown == 2


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x93",
        b"\xc1",
        msgspec.msgpack.encode("text"),
        msgspec.msgpack.encode([5.0, 3]),
        msgspec.msgpack.encode([5.0, [3]]),
        msgspec.msgpack.encode([5.0, [[]]]),
        msgspec.msgpack.encode([5.0, [{"type": "BlockRemoved"}]]),
        msgspec.msgpack.encode([5.0, [{"block_hashes": [1]}]]),
        msgspec.msgpack.encode([5.0, [["BlockStored", "abc", None, [1], 1]]]),
    ],
)
def test_what_is_no_batch_is_refused(payload: Any) -> None:
    with pytest.raises(MalformedBatch):
        decode_batch(payload)
