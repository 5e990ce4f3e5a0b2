from dataclasses import replace
from typing import Any

import pytest

from tandem_contract import metrics
from tandem_contract.paths import Role
from tandem_doctor.facts import Declared, Engine, Facts, Gpu, Sidecar, SideChannel
from tandem_doctor.findings import Finding, Severity, worst
from tandem_doctor.rules import diagnose
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
    declared = Declared({"model": "m", **dict(flags)}, transfer, {"UCX_TLS": "tcp"})
    made = Engine(
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
        declared=declared,
        side_channel=SideChannel("10.0.0.1:5600"),
        fabrics=frozenset({Fabric.TCP}),
    )
    return replace(made, **changes)


P, D = engine(Role.PREFILL), engine(Role.DECODE)


def bad(facts: Facts) -> list[Finding]:
    return [f for f in diagnose(facts) if f.severity is not Severity.OK]


def test_nothing_is_said_of_a_healthy_pair() -> None:
    facts = Facts((P, D), (Sidecar("decode-0"),), GPU)
    assert bad(facts) == []
    assert worst(diagnose(facts)) is Severity.OK


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
    (finding,) = bad(Facts((P, other), (), GPU))
    assert (finding.severity, finding.check) == (Severity.BROKEN, "compatible")
    assert finding.seen.startswith(item)
    assert "prefill has" in finding.seen
    assert finding.fix


def test_what_the_side_channel_says_is_compared() -> None:
    def with_backend(engine: Engine, name: str, fingerprint: str) -> Engine:
        channel = SideChannel("a:1", None, fingerprint, {"attn_backend_name": name})
        return replace(engine, side_channel=channel)

    (finding,) = bad(
        Facts((with_backend(P, "FLASH", "x"), with_backend(D, "TRITON", "y")), (), GPU)
    )
    assert finding.seen == "attention backend: prefill has FLASH, decode has TRITON"
    (finding,) = bad(Facts((with_backend(P, "FLASH", "x"), with_backend(D, "FLASH", "y")), (), GPU))
    assert "hashes differ" in finding.seen


def test_flags_that_come_to_the_same_are_no_fault() -> None:
    ngram = engine(Role.DECODE, ("speculative-config", '{"method": "ngram"}'))
    assert bad(Facts((P, ngram), (), GPU)) == []
    chain = {
        "connectors": [{"kv_connector": "NixlConnector"}, {"kv_connector": "OffloadingConnector"}]
    }
    many = {"kv_connector": "MultiConnector", "kv_connector_extra_config": chain}
    assert bad(Facts((engine(Role.PREFILL, transfer=many), D), (), GPU)) == []

    def with_hash(engine: Engine, fingerprint: str) -> Engine:
        return replace(engine, side_channel=SideChannel("a:1", None, fingerprint))

    asked = engine(Role.DECODE, ("dtype", "bfloat16"))
    assert bad(Facts((with_hash(P, "x"), with_hash(asked, "x")), (), GPU)) == []
    (finding,) = bad(Facts((with_hash(P, "x"), with_hash(asked, "y")), (), GPU))
    assert finding.seen == "dtype: prefill has auto, decode has bfloat16"


def test_of_two_revisions_each_is_held_against_its_own() -> None:
    def of(engine: Engine, compat: str, version: str) -> Engine:
        return replace(engine, pod=f"{engine.pod}-{compat}", compat=compat, version=version)

    def ident(name: str, engine: Engine) -> Engine:
        assert engine.declared is not None
        transfer = {**engine.declared.transfer, "engine_id": name}
        return replace(engine, declared=replace(engine.declared, transfer=transfer))

    old = of(P, "a", "1"), of(D, "a", "1")
    new = ident("p2", of(P, "b", "2")), ident("d2", of(D, "b", "2"))
    assert bad(Facts((*old, *new), (), GPU)) == []

    version, partner = bad(Facts((old[0], new[1]), (), GPU))
    assert version.seen == "version: prefill has 1, decode has 2"
    assert (partner.check, partner.subject) == ("partner", "decode-0-b")


def test_engines_of_two_groups_are_not_compared() -> None:
    other = replace(D, group="n", version="0.1")
    (finding,) = bad(Facts((P, other), (), GPU))
    assert (finding.check, finding.severity) == ("partner", Severity.WARNING)


def test_a_wider_prefill_is_a_warning() -> None:
    wide = engine(Role.PREFILL, ("tensor-parallel-size", "4"))
    (finding,) = bad(Facts((wide, D), (), GPU))
    assert (finding.severity, finding.check) == (Severity.WARNING, "compatible")
    assert bad(Facts((P, engine(Role.DECODE, ("tensor-parallel-size", "4"))), (), GPU)) == []


@pytest.mark.parametrize(
    ("engines", "check", "severity"),
    [
        ((replace(P, trouble="refused"), D), "reachable", Severity.BROKEN),
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
def test_what_is_wrong_with_an_engine(
    engines: tuple[Engine, ...], check: str, severity: Severity
) -> None:
    (finding,) = bad(Facts(engines, (), GPU))
    assert (finding.check, finding.severity) == (check, severity)
    assert finding.fix


@pytest.mark.parametrize(
    ("sidecar", "check", "severity"),
    [
        (Sidecar("d", trouble="refused"), "sidecar", Severity.BROKEN),
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
def test_what_is_wrong_with_a_sidecar(sidecar: Sidecar, check: str, severity: Severity) -> None:
    (finding,) = bad(Facts((P, D), (sidecar,), GPU))
    assert (finding.check, finding.severity) == (check, severity)


def test_gpus_far_apart_are_a_warning_and_none_is_unknown() -> None:
    far = (Gpu(0, "a", {1: "across sockets"}), Gpu(1, "b", {0: "across sockets"}))
    assert {f.severity for f in bad(Facts((P, D), (), far))} == {Severity.WARNING}
    (finding,) = bad(Facts((P, D), (), None, "no driver"))
    assert (finding.severity, finding.seen) == (Severity.UNKNOWN, "no driver")


def test_broken_things_come_first() -> None:
    order = list(Severity)
    found = [f.severity for f in diagnose(Facts((replace(P, trouble="x"), D), (), None, "none"))]
    assert found == sorted(found, key=lambda s: -order.index(s))
