import pytest

from tandem_operator.runtime.kv_transport_probe import counter_total

PAGE = b"""\
# HELP vllm:nixl_bytes_transferred bytes
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{engine="0",le="+Inf"} 3.0
vllm:nixl_bytes_transferred_count{engine="0"} 3.0
vllm:nixl_bytes_transferred_sum{engine="0"} 2.097152e+06
vllm:nixl_bytes_transferred_sum{engine="1"} 8.0
"""


def test_the_counter_sums_all_ranks() -> None:
    assert counter_total(PAGE) == 2097160.0


def test_a_missing_counter_is_none_and_not_zero() -> None:
    assert counter_total(b"vllm:num_requests_running 1.0\n") is None
    assert counter_total(b"vllm:nixl_bytes_transferred_sum 0.0\n") == 0.0


def test_a_malformed_counter_raises() -> None:
    with pytest.raises(ValueError, match="could not convert"):
        counter_total(b"vllm:nixl_bytes_transferred_sum many\n")
