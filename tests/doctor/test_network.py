"""What the doctor says about the network between engines."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tandem_contract import endpoints, metrics
from tandem_contract.paths import Role
from tandem_contract.pod_reports import (
    KV_BYTES,
    PREFILL_RATE,
    TRANSFER_RATE,
    TRANSFER_SECONDS,
    Estimate,
    PodReport,
    Source,
)
from tandem_doctor import processes
from tandem_doctor.facts import Engine, EngineCommand, EppReport, Facts, Gpu
from tandem_doctor.findings import Finding, Severity
from tandem_doctor.gather import gather_sidecar
from tandem_doctor.network import check_network
from tandem_planner.fabrics import Fabric

LLAMA_8B = 131_072.0
"""KV bytes per token of Llama 3 8B in bf16."""


def report(
    gigabytes_per_second: float, source: Source = Source.LEARNED, **figures: float
) -> EppReport:
    """An EPP that knows one prefill pod of 10,000 tokens per second, and one decode pod."""
    transfer = {
        TRANSFER_SECONDS: 0.002,
        TRANSFER_RATE: gigabytes_per_second,
        KV_BYTES: LLAMA_8B,
    } | figures
    prefill = Estimate(Source.LEARNED, 20, 1.0, {PREFILL_RATE: 10_000.0})
    return EppReport(
        "epp-0",
        (
            PodReport("p-0", "10.0.0.1:8000", "prefill", ("m",), estimates={"prefill": prefill}),
            PodReport(
                "d-0",
                "10.0.0.2:8000",
                "decode",
                ("m",),
                estimates={"transfer": Estimate(source, 20, 1.0, transfer)},
            ),
        ),
    )


def engine(
    environment: Mapping[str, str] | None = None, role: Role = Role.DECODE, **transfer: Any
) -> Engine:
    command = EngineCommand({}, {"kv_connector": "NixlConnector", **transfer}, environment or {})
    return Engine("d-0", role, "m", "10.0.0.2:8200", command=command)


def findings(*engines: Engine, **facts: Any) -> list[Finding]:
    return list(check_network(Facts(engines, **facts)))


@pytest.mark.parametrize(
    ("gigabytes_per_second", "severity", "judgement"),
    [
        (40.0, Severity.OK, "negligible"),
        (10.0, Severity.OK, "tolerable"),
        (3.125, Severity.OK, "considerable"),
        (1.0, Severity.WARNING, "too slow"),
    ],
)
def test_a_transfer_is_judged_beside_the_prefill_that_it_spares(
    gigabytes_per_second: float, severity: Severity, judgement: str
) -> None:
    [finding] = findings(epps=(report(gigabytes_per_second),))
    assert (finding.severity, finding.check, finding.subject) == (
        severity,
        "network",
        "epp-0: d-0",
    )
    assert f": {judgement}; at least 21 Gbit/s are needed" in finding.detail
    assert "1.05 GB" in finding.detail
    assert bool(finding.fix) == (severity is Severity.WARNING)


def test_fp8_is_advised_where_the_cache_is_larger() -> None:
    slow = {"epps": (report(1.0),)}
    assert "kvCacheDtype: fp8" in findings(engine(), **slow)[0].fix
    with_fp8 = replace(engine(), cache={"cache_dtype": "fp8_e4m3"})
    assert "kvCacheDtype" not in findings(with_fp8, **slow)[0].fix


def test_nothing_is_judged_before_both_sides_are_measured() -> None:
    assert findings(epps=(report(1.0, Source.PRIOR),)) == []
    assert findings(epps=(replace(report(1.0), pods=report(1.0).pods[1:]),)) == []


@pytest.mark.parametrize(
    ("names", "severity"),
    [
        ("mlx5_9:1", Severity.BROKEN),
        ("eth0,mlx5_9:1", Severity.WARNING),
        ("mlx5_0:1,eth0", None),
        ("mlx5_*", None),
        ("^lo", None),
        ("all", None),
    ],
)
def test_ucx_may_only_name_devices_that_exist(names: str, severity: Severity | None) -> None:
    named = engine({"UCX_NET_DEVICES": names})
    result = findings(named, network_devices=frozenset({"mlx5_0:1", "eth0", "lo"}))
    assert [f.severity for f in result] == ([] if severity is None else [severity])
    for finding in result:
        assert "mlx5_9:1" in finding.detail
        assert "eth0, lo, mlx5_0:1" in finding.detail
    assert findings(named) == [], "devices of another machine are not known"


def test_devices_of_this_machine() -> None:
    assert "lo" in processes.network_devices()


def test_blocks_staged_in_host_memory_beside_a_gpu_are_a_warning() -> None:
    staged = engine(kv_buffer_device="cpu")
    [finding] = findings(replace(staged, has_gpu=True))
    assert (finding.severity, finding.check) == (Severity.WARNING, "buffer")
    assert len(findings(staged, gpus=(Gpu(0, "one"),))) == 1
    assert findings(staged) == []
    assert findings(replace(engine(kv_buffer_device="cuda"), has_gpu=True)) == []


@pytest.mark.parametrize(
    ("transports", "facts", "words"),
    [
        ("tcp", {"gpus": (Gpu(0, "one"),)}, "with a GPU"),
        ("tcp,cuda_copy,sm", {"network_devices": frozenset({"mlx5_0:1"})}, "an RDMA device"),
        ("tcp", {"network_devices": frozenset({"eth0"})}, None),
        ("all", {"gpus": (Gpu(0, "one"),)}, None),
        ("rc,ud,sm", {"gpus": (Gpu(0, "one"),)}, None),
        ("^tcp", {"gpus": (Gpu(0, "one"),)}, None),
    ],
)
def test_tcp_is_named_where_rdma_is_expected(
    transports: str, facts: dict[str, Any], words: str | None
) -> None:
    result = findings(engine({"UCX_TLS": transports}), **facts)
    assert [f.check for f in result] == ([] if words is None else ["transport"])
    assert all(words in f.detail for f in result if words)


@pytest.mark.parametrize(
    ("transports", "devices", "is_named"),
    [
        ("rc,tcp", {"eth0"}, True),
        ("all", {"mlx5_0:1"}, True),
        ("all", {"eth0"}, False),
    ],
)
def test_transfers_over_tcp_are_named_where_rdma_was_asked_for(
    transports: str, devices: set[str], is_named: bool
) -> None:
    over_tcp = replace(engine({"UCX_TLS": transports}), fabrics=frozenset({Fabric.TCP}))
    result = findings(over_tcp, network_devices=frozenset(devices))
    assert [f.check for f in result] == (["transport"] if is_named else [])
    over_rdma = replace(over_tcp, fabrics=frozenset({Fabric.RDMA}))
    assert findings(over_rdma, network_devices=frozenset(devices)) == []


@pytest.mark.parametrize("host", [None, "localhost", "127.0.0.1", "::1", "10.0.0.1"])
def test_a_loopback_side_channel_is_broken_for_readers_on_other_machines(host: str | None) -> None:
    variables = {"VLLM_NIXL_SIDE_CHANNEL_HOST": host} if host else {}
    prefill = replace(engine(variables, Role.PREFILL), address="10.0.0.1:8000")
    result = findings(prefill, engine())
    expected = [] if host == "10.0.0.1" else [(Severity.BROKEN, "side channel")]
    assert [(f.severity, f.check) for f in result] == expected
    together = replace(engine(), address="10.0.0.1:8200")
    assert findings(prefill, together) == [], "on one machine"


@pytest.mark.parametrize("decode_host", ["10.0.0.1", "10.0.0.2"])
async def test_a_router_knows_a_loopback_side_channel_from_its_hand_offs(decode_host: str) -> None:
    """The engines' variables are not visible."""
    page = f'{metrics.LOOPBACK_SIDE_CHANNELS}{{backend="10.0.0.1:8000"}} 1.0\n'

    async def get(path: str) -> bytes:
        return page.encode() if path == endpoints.METRICS else b"ready"

    router = await gather_sidecar("router", get)
    backends = [
        replace(engine(role=Role.PREFILL), pod="p-0", command=None, address="10.0.0.1:8000"),
        replace(engine(), command=None, address=f"{decode_host}:8000"),
    ]
    result = check_network(Facts(tuple(backends), sidecars=(router,)))
    named = [(f.severity, f.subject) for f in result if f.check == "side channel"]
    assert named == ([(Severity.BROKEN, "p-0")] if decode_host != "10.0.0.1" else [])
