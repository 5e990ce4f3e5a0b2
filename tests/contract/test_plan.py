"""The signed plan: good for one request, one time, one set of keys."""

import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract.paths import RoutingPath
from tandem_contract.plan import (
    Plan,
    PlanRejected,
    ResumeLimits,
    Target,
    Timeouts,
    key_id,
    load_keys,
    sign,
    signing_key,
    signs_from,
)
from tandem_contract.plan_signer import PlanSigner
from tandem_contract.plan_verification import verify

OLD, NEW = {"2026-01": b"o" * 16}, {"2026-02": b"n" * 32}
PLAN = Plan(
    path=RoutingPath.PREFILL_THEN_DECODE,
    reason="split",
    decode=Target("d-0", "127.0.0.2:8000"),
    prefill=(Target("p-0", "127.0.0.3:8000"), Target("p-1", "127.0.0.4:8000")),
    cached_tokens=48,
    request_id="r-1",
    expires=1000.0,
)


def verified(value: str, keys: dict[str, bytes] = NEW, request_id: str = "r-1") -> Plan:
    return verify(value, keys, request_id=request_id, now=999.0)


def test_what_was_signed_is_read_back() -> None:
    assert verified(sign(PLAN, NEW, now=999.0)) == PLAN


@given(st.binary(max_size=300), st.binary(min_size=1, max_size=200))
def test_the_signature_is_an_hmac_of_sha256(content: bytes, secret: bytes) -> None:
    plan = Plan(RoutingPath.UNIFIED, content.hex(), Target("d", "h:1"))
    head, _, mac = sign(plan, {"k": secret}, now=0.0).rpartition(".")
    digest = hmac.digest(secret, head.encode(), "sha256")[:16]
    assert mac == urlsafe_b64encode(digest).decode().rstrip("=")


def test_a_signer_takes_the_next_key_when_its_time_has_come() -> None:
    first, second = key_id(1000.0), key_id(2000.0)
    signer = PlanSigner({first: b"f" * 16, second: b"s" * 16})
    times = (1000.0, 1999.9, 2000.0, 2000.9, 1999.0, 500.0)
    used = [signer.sign(PLAN, now).split(".")[1] for now in times]
    assert used == [first, first, second, second, first, first]


def test_a_plan_with_defaults_is_read_back() -> None:
    plan = Plan(RoutingPath.UNIFIED, "short", Target("d", "h:1"), request_id="r-1", expires=1000)
    assert verified(sign(plan, NEW, now=999.0)) == plan


def test_a_reader_that_knows_no_rank_reads_the_rest() -> None:
    class OldTarget(msgspec.Struct, array_like=True):
        name: str
        address: str

    encoded = msgspec.json.encode(Target("d", "h:1", 2))
    assert msgspec.json.decode(encoded, type=OldTarget).address == "h:1"
    assert msgspec.json.decode(b'["d", "h:1"]', type=Target) == Target("d", "h:1")


class OldPlan(msgspec.Struct, array_like=True, omit_defaults=True):
    """`Plan` before it had timeouts."""

    path: RoutingPath
    reason: str
    decode: Target
    prefill: tuple[Target, ...] = ()
    cached_tokens: int = 0
    request_id: str = ""
    expires: float = 0.0


def test_a_sidecar_that_knows_no_timeouts_reads_the_rest() -> None:
    signed = sign(msgspec.structs.replace(PLAN, timeouts=Timeouts(5.0, 2.5)), NEW, now=999.0)
    payload = signed.split(".")[2]
    plan = msgspec.json.decode(urlsafe_b64decode(payload + "=="), type=OldPlan)
    assert plan == OldPlan(*(getattr(PLAN, name) for name in OldPlan.__struct_fields__))


def test_the_plan_of_an_epp_that_knows_no_timeouts_has_none() -> None:
    old: Any = OldPlan(*(getattr(PLAN, name) for name in OldPlan.__struct_fields__))
    assert verified(sign(old, NEW, now=999.0)) == PLAN
    assert PLAN.timeouts == Timeouts(None, None)


@pytest.mark.parametrize("timeouts", [Timeouts(5.0), Timeouts(None, 2.5), Timeouts(5.0, 2.5)])
def test_timeouts_are_read_back(timeouts: Timeouts) -> None:
    plan = msgspec.structs.replace(PLAN, timeouts=timeouts)
    assert verified(sign(plan, NEW, now=999.0)) == plan


class PlanWithoutResume(OldPlan, array_like=True, omit_defaults=True):
    """`Plan` before it asked for streams to be resumed."""

    timeouts: Timeouts = Timeouts()
    alternates: tuple[Target, ...] | None = None


def test_a_sidecar_that_resumes_no_stream_reads_the_rest() -> None:
    asking = msgspec.structs.replace(PLAN, resume=ResumeLimits())
    payload = sign(asking, NEW, now=999.0).split(".")[2]
    plan = msgspec.json.decode(urlsafe_b64decode(payload + "=="), type=PlanWithoutResume)
    names = PlanWithoutResume.__struct_fields__
    assert plan == PlanWithoutResume(*(getattr(PLAN, name) for name in names))


def test_the_plan_of_an_epp_that_resumes_no_stream_asks_for_nothing() -> None:
    names = PlanWithoutResume.__struct_fields__
    old: Any = PlanWithoutResume(*(getattr(PLAN, name) for name in names))
    assert verified(sign(old, NEW, now=999.0)).resume is None


def test_the_limits_of_resumed_streams_are_read_back() -> None:
    plan = msgspec.structs.replace(PLAN, resume=ResumeLimits(0.5, 1))
    assert verified(sign(plan, NEW, now=999.0)).resume == ResumeLimits(0.5, 1)


def test_the_value_fits_a_header() -> None:
    value = sign(PLAN, NEW, now=999.0)
    assert value.isascii()
    assert value.isprintable()
    assert not set(value) & set(' ,;"')


@pytest.mark.parametrize("part", range(4))
def test_a_change_in_any_part_is_rejected(part: int) -> None:
    parts = sign(PLAN, NEW, now=999.0).split(".")
    for position, character in enumerate(parts[part]):
        replacement = "A" if character != "A" else "B"
        changed = parts[part][:position] + replacement + parts[part][position + 1 :]
        with pytest.raises(PlanRejected):
            verified(".".join([*parts[:part], changed, *parts[part + 1 :]]))


@pytest.mark.parametrize("part", range(4))
def test_a_part_left_out_or_emptied_is_rejected(part: int) -> None:
    parts = sign(PLAN, NEW, now=999.0).split(".")
    for remaining in ([*parts[:part], *parts[part + 1 :]], [*parts[:part], "", *parts[part + 1 :]]):
        with pytest.raises(PlanRejected):
            verified(".".join(remaining))


@given(st.text(max_size=60))
def test_any_text_is_rejected(value: str) -> None:
    with pytest.raises(PlanRejected):
        verified(value)


def test_a_header_that_was_not_ascii_is_rejected() -> None:
    with pytest.raises(PlanRejected, match="malformed"):
        verified("v1.2026-02.abc.\udcff")


def test_an_unsigned_payload_is_rejected() -> None:
    with pytest.raises(PlanRejected, match="signature is wrong"):
        verified(f"v1.2026-02.{urlsafe_b64encode(b'[]').decode()}.")


def test_a_signed_payload_of_another_shape_is_rejected() -> None:
    reason: Any = 7
    value = sign(Plan(RoutingPath.UNIFIED, reason, Target("d", "h:1")), NEW, now=999.0)
    with pytest.raises(PlanRejected, match="payload is malformed"):
        verified(value)


def test_another_requests_plan_is_rejected() -> None:
    with pytest.raises(PlanRejected, match="another request"):
        verified(sign(PLAN, NEW, now=999.0), request_id="r-2")


@pytest.mark.parametrize(("now", "good"), [(1000.0, True), (1000.1, False)])
def test_a_plan_is_good_until_it_expires(now: float, good: bool) -> None:
    value = sign(PLAN, NEW, now=999.0)
    if good:
        assert verify(value, NEW, request_id="r-1", now=now) == PLAN
    else:
        with pytest.raises(PlanRejected, match="expired"):
            verify(value, NEW, request_id="r-1", now=now)


def test_a_plan_without_expiry_has_expired() -> None:
    with pytest.raises(PlanRejected, match="expired"):
        verified(sign(Plan(PLAN.path, "r", PLAN.decode, request_id="r-1"), NEW, now=999.0))


def test_rotation_the_newest_key_signs_and_both_verify() -> None:
    both = {**OLD, **NEW}
    assert verified(sign(PLAN, both, now=999.0), NEW) == PLAN
    assert verified(sign(PLAN, OLD, now=999.0), both) == PLAN
    with pytest.raises(PlanRejected, match="unknown key"):
        verified(sign(PLAN, OLD, now=999.0), NEW)


def test_a_key_id_does_not_stand_for_its_secret() -> None:
    with pytest.raises(PlanRejected, match="signature is wrong"):
        verified(sign(PLAN, {"2026-02": b"x" * 16}, now=999.0), NEW)


def test_nothing_is_signed_without_a_key() -> None:
    with pytest.raises(ValueError, match="no plan key"):
        sign(PLAN, {}, now=999.0)


TIMED = {key_id(at): b"t" * 32 for at in (100.0, 200.0, 300.0)}


@pytest.mark.parametrize(
    ("now", "start"), [(99.9, 100.0), (100.0, 100.0), (199.9, 100.0), (200.0, 200.0), (1e9, 300.0)]
)
def test_the_newest_key_that_is_due_signs(now: float, start: float) -> None:
    value = sign(PLAN, TIMED, now=now)
    assert value.split(".")[1] == key_id(start)
    assert verified(value, TIMED) == PLAN


def test_a_key_without_a_time_signs_at_once_and_the_greatest_name_wins() -> None:
    assert signing_key({"1": b"", **TIMED}, now=0.0) == "1"
    assert signing_key({"1": b"", **TIMED}, now=100.0) == key_id(100.0)
    assert signing_key({"k1": b"", **TIMED}, now=1e9) == "k1"


@given(when=st.integers(min_value=0, max_value=4_000_000_000))
def test_a_key_signs_from_the_second_it_is_named_after(when: int) -> None:
    assert signs_from(key_id(when + 0.999)) == when


@pytest.mark.parametrize("name", ["k1", "", "20261399T000000Z", "2026-11-21T00:00:00Z"])
def test_a_key_name_without_a_time_has_no_start(name: str) -> None:
    assert signs_from(name) is None


def test_keys_are_the_files_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"s" * 16 + b"\n")
    (tmp_path / "..data").mkdir()
    (tmp_path / ".hidden").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert load_keys(tmp_path) == {"a": b"s" * 16, "b": b"s" * 16}


def test_a_short_secret_names_its_file_and_not_itself(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"hushhushhush")
    with pytest.raises(
        ValueError, match=f"{tmp_path}/a: .*at least 16 bytes, this has 12"
    ) as error:
        load_keys(tmp_path)
    assert "hush" not in str(error.value)


def test_a_key_id_with_a_dot_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.key").write_bytes(b"s" * 16)
    with pytest.raises(ValueError, match=r"a\.key: .*no dot"):
        load_keys(tmp_path)


def test_a_rejection_does_not_show_the_value() -> None:
    with pytest.raises(PlanRejected) as caught:
        verified(sign(PLAN, NEW, now=999.0), request_id="r-2")
    assert "127.0.0" not in str(caught.value)
