"""Mutual authentication, without sockets."""

from dataclasses import dataclass

import msgspec
import pytest

from tandem_contract.peer_handshake import Handshake, PeerRejected, Proof, Session

OLD = {"20260101T000000Z": b"a secret of sixteen bytes"}
NEW = {"20260102T000000Z": b"another secret of sixteen"}
TEST = Handshake(b"test", 1)
LATE = 4e9
"""Unix seconds when all keys may sign."""


@dataclass(frozen=True)
class Sessions:
    dialer: Session
    listener: Session


def shake(dialer: dict[str, bytes], listener: dict[str, bytes]) -> Sessions:
    first = TEST.hello("dialer", dialer)
    answer = TEST.challenge(first, "listener", listener, LATE)
    proof, dialers = TEST.prove(first, answer, dialer)
    return Sessions(dialers, TEST.accept(proof, first, answer, listener))


def test_both_sides_know_each_other_and_open_each_others_messages() -> None:
    sessions = shake(OLD, OLD)
    assert (sessions.dialer.peer, sessions.listener.peer) == ("listener", "dialer")
    for content in (b"one", b"", b"one"):
        assert sessions.listener.frames.open(sessions.dialer.frames.seal(content)) == content
    sealed = sessions.listener.acknowledgements.seal(b"done")
    assert sessions.dialer.acknowledgements.open(sealed) == b"done"


def test_a_rotation_uses_the_newest_key_that_both_hold() -> None:
    (old,), (new,) = OLD, NEW
    assert shake(OLD | NEW, OLD | NEW).dialer.key == new
    assert shake(OLD, OLD | NEW).dialer.key == old
    assert shake(OLD | NEW, OLD).listener.key == old


def reason(dialer: dict[str, bytes], listener: dict[str, bytes]) -> str:
    with pytest.raises(PeerRejected) as refusal:
        shake(dialer, listener)
    return refusal.value.reason


def test_without_a_common_key_there_is_no_session() -> None:
    assert reason(OLD, NEW) == "other_keys"
    assert reason(OLD, {}) == "no_keys"
    assert reason({}, OLD) == "other_keys"


def test_each_side_refuses_another_secret_under_the_same_id() -> None:
    (name,) = OLD
    forged = {name: b"a guessed secret of sixteen"}
    assert reason(OLD, forged) == "wrong_proof"
    first = TEST.hello("dialer", forged)
    answer = TEST.challenge(first, "listener", OLD, LATE)
    with pytest.raises(PeerRejected) as refusal:
        TEST.accept(Proof(b"x" * 32), first, answer, OLD)
    assert refusal.value.reason == "wrong_proof"


def test_a_recorded_handshake_cannot_be_replayed() -> None:
    first = TEST.hello("dialer", OLD)
    answer = TEST.challenge(first, "listener", OLD, LATE)
    proof, _ = TEST.prove(first, answer, OLD)
    again = TEST.challenge(first, "listener", OLD, LATE)
    with pytest.raises(PeerRejected):
        TEST.accept(proof, first, again, OLD)
    with pytest.raises(PeerRejected):
        TEST.prove(TEST.hello("dialer", OLD), answer, OLD)


def test_a_proof_of_one_protocol_does_not_count_in_another() -> None:
    first = TEST.hello("dialer", OLD)
    answer = Handshake(b"other", 1).challenge(first, "listener", OLD, LATE)
    with pytest.raises(PeerRejected):
        TEST.prove(first, answer, OLD)


def test_a_listeners_proof_is_no_dialers_proof() -> None:
    first = TEST.hello("dialer", OLD)
    answer = TEST.challenge(first, "listener", OLD, LATE)
    with pytest.raises(PeerRejected):
        TEST.accept(Proof(answer.proof), first, answer, OLD)


def test_what_the_handshake_says_cannot_be_changed_on_its_way() -> None:
    first = TEST.hello("dialer", OLD | NEW)
    downgraded = msgspec.structs.replace(first, keys=sorted(OLD))
    answer = TEST.challenge(downgraded, "listener", OLD | NEW, LATE)
    with pytest.raises(PeerRejected):
        TEST.prove(first, answer, OLD | NEW)


def test_another_version_is_refused_by_both_sides() -> None:
    first = TEST.hello("dialer", OLD)
    with pytest.raises(PeerRejected, match="version 9"):
        TEST.challenge(msgspec.structs.replace(first, version=9), "listener", OLD, LATE)
    answer = TEST.challenge(first, "listener", OLD, LATE)
    with pytest.raises(PeerRejected, match="version 9"):
        TEST.prove(first, msgspec.structs.replace(answer, version=9), OLD)


@pytest.mark.parametrize("attack", ["repeat", "reorder", "change", "reflect", "shorten"])
def test_a_message_is_accepted_once_in_its_place_and_unchanged(attack: str) -> None:
    sessions = shake(OLD, OLD)
    first, second = (sessions.dialer.frames.seal(content) for content in (b"one", b"two"))
    messages = {
        "repeat": [first, first],
        "reorder": [second],
        "change": [first[:-1] + b"x"],
        "reflect": [sessions.listener.acknowledgements.seal(b"one")],
        "shorten": [first[:10]],
    }[attack]
    for message in messages[:-1]:
        sessions.listener.frames.open(message)
    with pytest.raises(PeerRejected) as refusal:
        sessions.listener.frames.open(messages[-1])
    assert refusal.value.reason == "wrong_mac"
