"""Fabrics: assumed rates, and the verdict on a transfer."""

import pytest

from tandem_planner.fabrics import FABRICS, Fabric, Verdict, least_rate, verdict

LLAMA_7B = 524_288
"""KV bytes per token of 32 layers with 32 heads of 128 elements, fp16."""


def test_every_fabric_reaches_a_part_of_its_peak() -> None:
    assert FABRICS.keys() == set(Fabric)
    for rate in FABRICS.values():
        assert 0 < rate.efficiency < 1
        assert rate.assumed < rate.peak
        assert rate.link


@pytest.mark.parametrize(
    ("fabric", "expected"),
    [
        (Fabric.NVLINK, Verdict.TOLERABLE),
        (Fabric.PCIE, Verdict.CONSIDERABLE),
        (Fabric.RDMA, Verdict.CONSIDERABLE),
        (Fabric.TCP, Verdict.TOO_SLOW),
    ],
)
def test_a_prompt_of_4096_tokens_of_a_7b_model(fabric: Fabric, expected: Verdict) -> None:
    """Its prefill takes about half a second on one accelerator."""
    kv_bytes = 4096 * LLAMA_7B
    assert verdict(kv_bytes / FABRICS[fabric].assumed, 0.5) is expected


def test_the_least_rate_is_where_a_transfer_becomes_too_slow() -> None:
    kv_bytes, prefill = 1e9, 0.8
    rate = least_rate(kv_bytes, prefill)
    assert rate == 2.5e9
    assert verdict(kv_bytes / rate, prefill) is Verdict.CONSIDERABLE
    assert verdict(kv_bytes / (0.99 * rate), prefill) is Verdict.TOO_SLOW
    assert verdict(0.0, prefill) is Verdict.NEGLIGIBLE
