import pytest

from tandem_sidecar.observability.record import (
    RemoteParent,
    TraceContext,
    parse_traceparent,
    span_id_of,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(("flags", "sampled"), [("01", True), ("00", False), ("ff", True)])
def test_a_traceparent_names_trace_span_and_sampled_flag(flags: str, sampled: bool) -> None:
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-{flags}") == RemoteParent(TRACE, SPAN, sampled)


def test_further_fields_of_a_later_version_are_ignored() -> None:
    assert parse_traceparent(f"cc-{TRACE}-{SPAN}-01-what-follows") == RemoteParent(
        TRACE, SPAN, True
    )


@pytest.mark.parametrize(
    "value",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01\n",
    ],
)
def test_a_malformed_traceparent_names_no_parent(value: str) -> None:
    assert parse_traceparent(value) is None


def test_each_leg_gets_its_own_span_in_the_same_trace() -> None:
    context = TraceContext(TRACE, SPAN)
    legs = {context.new_traceparent() for _ in range(8)}
    assert len({span_id_of(leg) for leg in legs} | {SPAN}) == 9
    assert {(parse_traceparent(leg) or RemoteParent("", "", False)).trace_id for leg in legs} == {
        TRACE
    }
