from urllib.parse import unquote

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract import endpoints
from tandem_contract.paths import RoutingPath
from tandem_contract.timing import Timing
from tandem_contract.trace import (
    CandidateTrace,
    DecisionTrace,
    LegTrace,
    SidecarTrace,
    trace_path,
)


def test_a_sidecars_answer_reads_back_equal() -> None:
    leg = LegTrace("prefill", "p-0", "r-1", 0.1, ended=0.5, timing=Timing(queue=0.2, cached=3))
    finished = SidecarTrace(
        "r", "chat", "/v1/chat/completions", 1.5, path=RoutingPath.FALLBACK, legs=(leg,)
    )
    running = SidecarTrace("r", "passthrough", "/tokenize", 2.5)
    data = msgspec.json.encode([finished, running])
    assert msgspec.json.decode(data, type=list[SidecarTrace]) == [finished, running]


def test_an_epps_answer_reads_back_equal() -> None:
    decision = DecisionTrace(
        "r",
        1.5,
        0.001,
        path=RoutingPath.PREFILL_THEN_DECODE,
        decode=(CandidateTrace("d", "10.0.0.1:8000", 2, waiting=1.0, kv_usage=0.5),),
        prefill=(CandidateTrace("p", "10.0.0.2:8000"),),
    )
    data = msgspec.json.encode([decision])
    assert msgspec.json.decode(data, type=list[DecisionTrace]) == [decision]


@given(st.text("".join(map(chr, range(0x21, 0x7F))), min_size=1))
def test_any_id_a_header_may_carry_is_one_path_segment(request_id: str) -> None:
    segment = trace_path(request_id).removeprefix(endpoints.REQUESTS)
    assert not set(segment) & set("/?#")
    assert unquote(segment) == request_id
