"""The order and the coding of frames, without sockets."""

from array import array
from itertools import count

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_epp.exchange import Ending
from tandem_epp.replicas.peers.frames import (
    MAX_CHAIN,
    AnswerBroke,
    Event,
    PodEjected,
    RequestEnded,
    RequestStarted,
    decode_events,
    decode_frame,
    encode_event,
    encode_frame,
    pack,
    unpack,
)
from tandem_epp.replicas.peers.inbox import Inbox, Verdict
from tandem_epp.replicas.peers.outbox import MAX_FRAME, Outbox


class Log:
    """What a receiver was told."""

    def __init__(self) -> None:
        self.resets = 0
        self.events: list[Event] = []
        self.verdicts: list[Verdict] = []

    def lacks_snapshot(self, peer: str) -> bool:
        return False

    def reset(self, peer: str) -> None:
        self.resets += 1
        self.events.clear()

    def apply(self, peer: str, event: Event) -> None:
        self.events.append(event)

    def count(self, verdict: Verdict, events: int) -> None:
        self.verdicts += [verdict] * events


def inbox() -> tuple[Inbox, Log]:
    log = Log()
    return Inbox("peer", log, log.count), log


def outbox(*snapshot: Event, max_queue: int = 1000) -> tuple[Outbox, list[int]]:
    dropped: list[int] = []
    return Outbox(count(), lambda: map(encode_event, snapshot), dropped.append, max_queue), dropped


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20))
def test_a_chain_survives_packing(hashes: list[int]) -> None:
    chain = array("Q", hashes)
    assert unpack(pack(chain)) == chain


def test_a_long_chain_is_cut_and_a_part_of_a_hash_ignored() -> None:
    assert len(unpack(pack(array("Q", range(MAX_CHAIN + 5))))) == MAX_CHAIN
    assert unpack(pack(array("Q", [1, 2])) + b"part") == array("Q", [1, 2])


def test_events_survive_and_unknown_kinds_and_fields_are_ignored() -> None:
    started = RequestStarted(7, "d", ("p",), status=200, chain=pack(array("Q", [1, 2])))
    newer = msgspec.msgpack.encode((3, (7, "a field of a later version")))
    unknown = msgspec.msgpack.encode((99, {"a": "later kind"}))
    # An older replica asks for the turn to decide.
    older = msgspec.msgpack.encode((11, (1,)))
    data = encode_frame(1, 0, [encode_event(started), unknown, older, newer], is_snapshot=True)
    events = list(decode_events(decode_frame(data)))
    assert events[:3] == [started, None, None]
    assert events[3].request == 7  # type: ignore[union-attr]
    box, log = inbox()
    assert box.receive(decode_frame(data)) is Verdict.APPLIED
    assert log.verdicts == [Verdict.APPLIED] * 2 + [Verdict.UNKNOWN] * 2


@pytest.mark.parametrize(
    "event", [(7, ("10.0.0.1:8000", 1.0, "later way")), (8, ("id", "10.0.0.1:8000", "later way"))]
)
def test_an_answer_that_ended_in_an_unknown_way_is_ignored(event: object) -> None:
    newer = msgspec.msgpack.encode(event)
    known = encode_event(AnswerBroke("10.0.0.1:8000", 1.0, Ending.LEFT))
    frame = decode_frame(encode_frame(1, 0, [newer, known], is_snapshot=True))
    box, log = inbox()
    assert box.receive(frame) is Verdict.APPLIED
    assert log.events == [AnswerBroke("10.0.0.1:8000", 1.0, Ending.LEFT)]
    assert log.verdicts == [Verdict.APPLIED, Verdict.UNKNOWN]


def test_a_frame_is_applied_once_and_only_in_order() -> None:
    sender, _ = outbox(RequestStarted(1, "d"))
    frames = [decode_frame(sender.next_frame().data)]
    for number in range(2, 5):
        sender.put(encode_event(RequestStarted(number, "d")))
        frames.append(decode_frame(sender.next_frame().data))
    box, log = inbox()
    assert box.receive(frames[1]) is Verdict.GAP, "no snapshot came"
    assert [box.receive(frame) for frame in frames[:2]] == [Verdict.APPLIED] * 2
    assert [box.receive(frame) for frame in frames[:2]] == [Verdict.OLD] * 2
    assert box.receive(frames[3]) is Verdict.GAP
    assert box.receive(frames[2]) is Verdict.GAP, "it is in order, but a later one came first"
    assert [event.request for event in log.events] == [1, 2]  # type: ignore[union-attr]
    assert log.resets == 1


def test_a_later_snapshot_heals_a_gap_and_an_earlier_one_changes_nothing() -> None:
    epochs = count()
    box, log = inbox()
    first, second = (
        Outbox(epochs, lambda: [encode_event(RequestEnded(1))]).next_frame() for _ in range(2)
    )
    assert box.receive(decode_frame(second.data)) is Verdict.APPLIED
    assert box.receive(decode_frame(first.data)) is Verdict.OLD
    assert (log.resets, len(log.events)) == (1, 1)


def test_an_overflow_drops_the_queue_and_begins_an_epoch_with_a_snapshot() -> None:
    event = encode_event(PodEjected("d", 1.0))
    sender, dropped = outbox(RequestStarted(1, "d"), max_queue=3 * len(event))
    first = decode_frame(sender.next_frame().data)
    for _ in range(5):
        sender.put(event)
    assert dropped == [4], "the fourth overflows the queue, the fifth is in the snapshot"
    second = decode_frame(sender.next_frame().data)
    assert (second.is_snapshot, second.epoch > first.epoch, second.number) == (True, True, 0)
    assert list(decode_events(second)) == [RequestStarted(1, "d")]
    assert sender.is_empty


def test_a_large_snapshot_takes_several_frames() -> None:
    chain = pack(array("Q", range(MAX_CHAIN)))
    started = [RequestStarted(number, "d", chain=chain) for number in range(3)]
    sender, _ = outbox(*started)
    box, log = inbox()
    frames = 0
    while not sender.is_empty:
        assert not box.is_complete
        assert box.receive(decode_frame(sender.next_frame().data)) is Verdict.APPLIED
        frames += 1
    assert box.is_complete
    assert frames == 3
    assert log.events == started
    assert log.resets == 1


def test_a_snapshot_larger_than_the_queue_completes_between_other_events() -> None:
    started = [RequestStarted(number, "d", chain=bytes(MAX_FRAME)) for number in range(4)]
    ended = encode_event(RequestEnded(1))
    sender, dropped = outbox(*started, max_queue=6 * len(ended))
    box, log = inbox()
    for _ in started:
        assert not box.is_complete
        assert box.receive(decode_frame(sender.next_frame().data)) is Verdict.APPLIED
        sender.put(ended)
    assert (box.is_complete, log.resets, dropped) == (True, 1, [])
    # The queue is still bounded: these and the four before.
    for _ in range(3):
        sender.put(ended)
    assert dropped == [7]


def test_sent_events_make_room_for_others_behind_a_snapshot() -> None:
    ended = encode_event(RequestEnded(1))
    sender, dropped = outbox(*[RequestStarted(1, "d")] * 3, max_queue=4 * len(ended))
    sender.next_frame()
    for _ in range(10):
        for _ in range(4):
            sender.put(ended)
        sender.next_frame()
    assert not dropped


def test_a_malformed_frame_is_an_error() -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_frame(b"\x93\x01")


def test_a_receiver_asks_for_a_snapshot_once_per_epoch() -> None:
    sender, _ = outbox(RequestStarted(1, "d"))
    box, _ = inbox()
    assert box.needs_snapshot
    first = decode_frame(sender.next_frame().data)
    box.receive(first)
    assert not box.needs_snapshot
    for _ in range(2):
        sender.put(encode_event(RequestEnded(1)))
        lost = sender.next_frame()
    box.receive(decode_frame(lost.data))
    assert box.needs_snapshot, "a frame is missing"
    assert sender.restart(first.epoch)
    assert not sender.restart(first.epoch), "a second acknowledgement asks for the same"
    again = decode_frame(sender.next_frame().data)
    assert (again.is_snapshot, again.epoch > first.epoch) == (True, True)
    assert not sender.restart(first.epoch), "a late acknowledgement of the epoch before"
    box.receive(again)
    assert not box.needs_snapshot
