from dataclasses import replace
from typing import Any

import pytest

from tandem_contract import metrics
from tandem_contract.paths import Role
from tandem_doctor.checks import run_checks
from tandem_doctor.facts import Engine, EngineCommand, Facts, Gpu, Sidecar, SideChannel
from tandem_doctor.findings import Finding, Severity, worst
from tandem_planner.fabrics import Fabric

GPU = (Gpu(0, "one"),)


def engine(role: Role, *flags: tuple[str, str], **changes: Any) -> Engine:
    kv_role = "kv_producer" if role is Role.PREFILL else "kv_consumer"
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": kv_role,
        "kv_load_failure_policy": "recompute",
        "engine_id": role.value,
    } | changes.pop("transfer", {})
    environment = {"UCX_TLS": "all", "UCX_TCP_PORT_RANGE": "20000-20999"}
    command = EngineCommand({"model": "m", **dict(flags)}, transfer, environment)
    base = Engine(
        pod=f"{role.value}-0",
        role=role,
        group="m",
        address="10.0.0.1:8000",
        version="0.32.0",
        model="m",
        max_model_len=4096,
        cache={"block_size": "64", "cache_dtype": "auto"},
        counters={
            f"{metrics.ENGINE_XFER_BYTES}_sum": 1e9,
            f"{metrics.ENGINE_XFER_SECONDS}_sum": 1.0,
        },
        command=command,
        side_channel=SideChannel("10.0.0.1:5600"),
        fabrics=frozenset({Fabric.TCP}),
    )
    return replace(base, **changes)


P, D = engine(Role.PREFILL), engine(Role.DECODE)


def problems(facts: Facts) -> list[Finding]:
    return [f for f in run_checks(facts) if f.severity is not Severity.OK]


def test_a_healthy_pair_has_no_problems() -> None:
    facts = Facts((P, D), (Sidecar("decode-0"),), GPU)
    assert problems(facts) == []
    assert worst(run_checks(facts)) is Severity.OK


@pytest.mark.parametrize(
    ("other", "item"),
    [
        (replace(D, version="0.31.0"), "version"),
        (engine(Role.DECODE, transfer={"kv_connector": "NixlPushConnector"}), "connector"),
        (engine(Role.DECODE, ("model", "n")), "model"),
        (engine(Role.DECODE, ("dtype", "float32")), "dtype"),
        (replace(D, cache={"block_size": "64", "cache_dtype": "fp8"}), "kvCacheDtype"),
        (replace(D, cache={"block_size": "16", "cache_dtype": "auto"}), "blockSize"),
        (replace(D, max_model_len=2048), "maxModelLen"),
        (
            engine(Role.DECODE, ("speculative-config", '{"method": "eagle3", "model": "d"}')),
            "speculation",
        ),
        (engine(Role.DECODE, ("disable-hybrid-kv-cache-manager", "true")), "hybrid"),
        (replace(D, adapters=frozenset({"lora"})), "LoRA"),
    ],
)
def test_each_item_that_differs_is_named_with_both_values(other: Engine, item: str) -> None:
    (finding,) = problems(Facts((P, other), (), GPU))
    assert (finding.severity, finding.check) == (Severity.BROKEN, "compatible")
    assert finding.detail.startswith(item)
    assert "prefill has" in finding.detail
    assert finding.fix


def test_side_channel_metadata_is_compared() -> None:
    def with_backend(engine: Engine, name: str, compatibility_hash: str) -> Engine:
        channel = SideChannel("a:1", None, compatibility_hash, {"attn_backend_name": name})
        return replace(engine, side_channel=channel)

    (finding,) = problems(
        Facts((with_backend(P, "FLASH", "x"), with_backend(D, "TRITON", "y")), (), GPU)
    )
    assert finding.detail == "attention backend: prefill has FLASH, decode has TRITON"
    (finding,) = problems(
        Facts((with_backend(P, "FLASH", "x"), with_backend(D, "FLASH", "y")), (), GPU)
    )
    assert "hashes differ" in finding.detail


def test_flags_with_the_same_effect_are_equal() -> None:
    ngram = engine(Role.DECODE, ("speculative-config", '{"method": "ngram"}'))
    assert problems(Facts((P, ngram), (), GPU)) == []
    chain = {
        "connectors": [{"kv_connector": "NixlConnector"}, {"kv_connector": "OffloadingConnector"}]
    }
    many = {"kv_connector": "MultiConnector", "kv_connector_extra_config": chain}
    assert problems(Facts((engine(Role.PREFILL, transfer=many), D), (), GPU)) == []

    def with_hash(engine: Engine, compatibility_hash: str) -> Engine:
        return replace(engine, side_channel=SideChannel("a:1", None, compatibility_hash))

    bfloat16 = engine(Role.DECODE, ("dtype", "bfloat16"))
    assert problems(Facts((with_hash(P, "x"), with_hash(bfloat16, "x")), (), GPU)) == []
    (finding,) = problems(Facts((with_hash(P, "x"), with_hash(bfloat16, "y")), (), GPU))
    assert finding.detail == "dtype: prefill has auto, decode has bfloat16"


def with_lmcache(role: Role, seed: str = "1", found: float = 0, **extra: Any) -> Engine:
    """An engine with LMCacheConnectorV1 that has looked 20,000 tokens up."""
    transfer = {"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": extra}
    base = engine(role, transfer=transfer, side_channel=None)
    assert base.command is not None
    command = replace(base.command, environment={"PYTHONHASHSEED": seed})
    counters = {metrics.ENGINE_EXTERNAL_QUERIES: 2e4, metrics.ENGINE_EXTERNAL_HITS: found}
    return replace(base, command=command, counters=counters)


def test_a_decode_engine_that_finds_nothing_in_lmcache_is_a_warning() -> None:
    prefill, found = with_lmcache(Role.PREFILL), with_lmcache(Role.DECODE, found=9e3)
    assert problems(Facts((prefill, found), (), GPU)) == []
    details = [f.detail for f in run_checks(Facts((prefill, found), (), GPU))]
    assert "9000 of 20000 prompt tokens were found in LMCache" in details
    (finding,) = problems(Facts((prefill, with_lmcache(Role.DECODE)), (), GPU))
    assert (finding.check, finding.severity) == ("LMCache hits", Severity.WARNING)
    idle = replace(found, counters={})
    (finding,) = problems(Facts((prefill, idle), (), GPU))
    assert (finding.check, finding.severity) == ("LMCache hits", Severity.UNKNOWN)


def test_lmcaches_keys_are_compared() -> None:
    prefill = with_lmcache(Role.PREFILL)
    other = with_lmcache(Role.DECODE, seed="2", found=1, **{"lmcache.chunk_size": 64})
    details = {f.detail for f in problems(Facts((prefill, other), (), GPU))}
    assert details == {
        "hash seed: prefill has 1, decode has 2",
        "chunk size: prefill has default, decode has 64",
    }


def test_engines_are_compared_within_their_revision() -> None:
    def of(engine: Engine, compat: str, version: str) -> Engine:
        return replace(engine, pod=f"{engine.pod}-{compat}", compat=compat, version=version)

    def ident(name: str, engine: Engine) -> Engine:
        assert engine.command is not None
        transfer = {**engine.command.kv_transfer_config, "engine_id": name}
        return replace(engine, command=replace(engine.command, kv_transfer_config=transfer))

    old = of(P, "a", "1"), of(D, "a", "1")
    new = ident("p2", of(P, "b", "2")), ident("d2", of(D, "b", "2"))
    assert problems(Facts((*old, *new), (), GPU)) == []

    version, partner = problems(Facts((old[0], new[1]), (), GPU))
    assert version.detail == "version: prefill has 1, decode has 2"
    assert (partner.check, partner.subject) == ("partner", "decode-0-b")


def test_engines_of_two_groups_are_not_compared() -> None:
    other = replace(D, group="n", version="0.1")
    (finding,) = problems(Facts((P, other), (), GPU))
    assert (finding.check, finding.severity) == ("partner", Severity.WARNING)


def test_a_wider_prefill_is_a_warning_only_where_transfers_fail() -> None:
    wide = engine(Role.PREFILL, ("tensor-parallel-size", "4"))
    assert problems(Facts((wide, D), (), GPU)) == []
    failing = replace(D, counters={**D.counters, metrics.ENGINE_XFER_FAILED: 1.0})
    assert "compatible" in [f.check for f in problems(Facts((wide, failing), (), GPU))]
    assert problems(Facts((P, engine(Role.DECODE, ("tensor-parallel-size", "4"))), (), GPU)) == []


def test_kv_that_expires_behind_failed_handshakes_is_not_blamed_on_the_lease() -> None:
    expired = replace(P, counters={metrics.ENGINE_KV_EXPIRED: 3.0})
    (alone,) = problems(Facts((expired, D), (), GPU))
    assert alone.fix is not None
    assert "leaseDuration" in alone.fix
    failing = replace(D, counters={**D.counters, metrics.ENGINE_HANDSHAKES_FAILED: 3.0})
    lost = {f.subject: f for f in problems(Facts((expired, failing), (), GPU))}
    assert "3 handshakes with a prefill engine failed" in lost[D.pod].detail
    fix = lost[P.pod].fix
    assert fix is not None
    assert "see the finding on handshakes" in fix
    assert "leaseDuration" not in fix


@pytest.mark.parametrize(
    ("engines", "check", "severity"),
    [
        ((replace(P, error="refused"), D), "reachable", Severity.BROKEN),
        ((engine(Role.PREFILL, transfer={"kv_role": "kv_consumer"}), D), "role", Severity.BROKEN),
        ((engine(Role.PREFILL, transfer={"kv_role": "kv_both"}), D), "role", Severity.WARNING),
        (
            (P, engine(Role.DECODE, transfer={"kv_load_failure_policy": "fail"})),
            "load failure",
            Severity.WARNING,
        ),
        (
            (replace(P, side_channel=SideChannel("a:5600", "refused")), D),
            "side channel",
            Severity.BROKEN,
        ),
        ((replace(P, side_channel=None), D), "side channel", Severity.UNKNOWN),
        (
            (replace(P, counters={metrics.ENGINE_KV_EXPIRED: 3.0}), D),
            "lost KV",
            Severity.WARNING,
        ),
        ((P, replace(D, counters={})), "transfer rate", Severity.UNKNOWN),
        ((P, replace(D, fabrics=frozenset({Fabric.RDMA}))), "transfer rate", Severity.WARNING),
        ((P, engine(Role.DECODE, transfer={"engine_id": "prefill"})), "engine id", Severity.BROKEN),
        (
            (replace(P, counters={metrics.ENGINE_WAITING: 9.0}), D),
            "balance",
            Severity.WARNING,
        ),
    ],
)
def test_problems_of_an_engine(engines: tuple[Engine, ...], check: str, severity: Severity) -> None:
    (finding,) = problems(Facts(engines, (), GPU))
    assert (finding.check, finding.severity) == (check, severity)
    assert finding.fix


def test_failed_transfers_are_tried_in_eager_mode_last() -> None:
    failed = replace(D, counters={metrics.ENGINE_XFER_FAILED: 3.0})
    (finding,) = [f for f in problems(Facts((P, failed), (), GPU)) if f.check == "lost KV"]
    assert "3 transfers failed" in finding.detail
    first, _, last = finding.fix.partition("--enforce-eager")
    assert "side channel" in first
    assert "CUDA graphs" in last


@pytest.mark.parametrize(
    ("sidecar", "check", "severity"),
    [
        (Sidecar("d", error="refused"), "sidecar", Severity.BROKEN),
        (Sidecar("d", not_ready="draining"), "sidecar", Severity.WARNING),
        (
            Sidecar(
                "d",
                counters={f"{metrics.REQUESTS}{{fallback}}": 50, metrics.FALLBACKS: 50},
            ),
            "fallbacks",
            Severity.WARNING,
        ),
        (
            Sidecar("d", counters={f"{metrics.ERRORS}{{kv_transfer}}": 1}),
            "lost KV",
            Severity.WARNING,
        ),
    ],
)
def test_problems_of_a_sidecar(sidecar: Sidecar, check: str, severity: Severity) -> None:
    (finding,) = problems(Facts((P, D), (sidecar,), GPU))
    assert (finding.check, finding.severity) == (check, severity)


def test_gpus_on_different_sockets_are_a_warning_and_no_nvml_is_unknown() -> None:
    far = (Gpu(0, "a", {1: "across sockets"}), Gpu(1, "b", {0: "across sockets"}))
    assert {f.severity for f in problems(Facts((P, D), (), far))} == {Severity.WARNING}
    (finding,) = problems(Facts((P, D), (), None, "no driver"))
    assert (finding.severity, finding.detail) == (Severity.UNKNOWN, "no driver")


def test_the_most_severe_findings_come_first() -> None:
    order = list(Severity)
    severities = [
        f.severity for f in run_checks(Facts((replace(P, error="x"), D), (), None, "none"))
    ]
    assert severities == sorted(severities, key=lambda s: -order.index(s))


def test_streamed_hand_offs_are_reported() -> None:
    counters = {f"{metrics.REQUESTS}{{prefill_then_decode}}": 9.0, metrics.STREAMED_HANDOFFS: 7.0}
    facts = Facts((P, D), (Sidecar("d", counters=counters),), GPU)
    assert problems(facts) == []
    [finding] = [f for f in run_checks(facts) if f.check == "streamed KV"]
    assert finding.detail == "7 of 9 hand-offs moved KV while the prefill computed it"
