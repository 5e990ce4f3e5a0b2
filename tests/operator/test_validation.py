"""Validation of pools from the API server: each by itself, and each pair."""

import copy
from typing import Any

import pytest

from tandem_contract import labels
from tandem_operator.conditions import Reason
from tandem_operator.planning.validation import PoolValidation, validate_set
from tandem_operator.resources.pool_files import parse_pools
from tandem_operator.resources.schema import defaulted

from .pool_yaml import DECODE, PREFILL, decode_pool, documents, prefill_pool


def served(pool: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    """The object as the API server returns it."""
    body: dict[str, Any] = defaulted(pool["kind"], copy.deepcopy(pool))
    body["metadata"] |= {"namespace": "default", **metadata}
    return body


def decode(prefill: dict[str, Any] | None, pool: dict[str, Any]) -> PoolValidation:
    above = served(prefill) if prefill else None
    return validate_set(above, [served(pool)]).decodes[pool["metadata"]["name"]]


def test_api_objects_and_files_give_equal_pools() -> None:
    (from_files,) = parse_pools(documents(PREFILL, DECODE))
    reading = validate_set(served(PREFILL), [served(DECODE)])
    assert reading.prefill is not None
    assert reading.prefill.pool == from_files.prefill
    assert reading.decodes["d"].pool == from_files.decodes[0]
    assert reading.decodes["d"].replicas == 2


def test_a_default_of_a_later_schema_changes_no_revision() -> None:
    spelled = served(PREFILL)
    bare = {**spelled, "spec": PREFILL["spec"]}
    assert validate_set(spelled, []).prefill == validate_set(bare, []).prefill


def test_restarted_at_changes_the_revision_but_not_the_compat_hash() -> None:
    def pool(**annotations: str) -> Any:
        reading = validate_set(served(PREFILL, annotations=annotations), []).prefill
        assert reading is not None
        return reading.pool

    once, again = pool(), pool(**{labels.RESTARTED_AT: "2026-01-01"})
    assert (once.compat, once.revision != again.revision) == (again.compat, True)
    assert pool(other="x").revision == once.revision


def test_an_unchanged_object_is_validated_once() -> None:
    body = served(PREFILL, uid="a-uid-of-its-own", generation=1)
    first = validate_set(body, []).prefill
    assert validate_set(copy.deepcopy(body), []).prefill is first
    body["metadata"]["generation"] = 2
    assert validate_set(body, []).prefill is not first


def test_a_generation_that_comes_again_with_another_spec_is_validated_again() -> None:
    # So it is after etcd was restored to an older state. The new spec may arrive in the answer to a
    # write of the operator, before any list.
    metadata = {"uid": "a-restored-uid", "generation": 3}
    before, after = (served(pool, **metadata) for pool in (PREFILL, copy.deepcopy(PREFILL)))
    after["spec"]["replicas"] = before["spec"]["replicas"] + 1
    replicas = [reading.replicas for body in (before, after) if (reading := _prefill(body))]
    assert replicas == [before["spec"]["replicas"], after["spec"]["replicas"]]
    decode_metadata = {"uid": "a-decode-uid", "generation": 1}
    two = served(DECODE, **decode_metadata)
    changed = served(prefill_pool(engine={"blockSize": 128}), **metadata)
    first, second = (validate_set(body, [two]).decodes["d"] for body in (before, changed))
    assert first != second


def _prefill(body: dict[str, Any]) -> PoolValidation | None:
    return validate_set(body, []).prefill


def test_a_missing_peer() -> None:
    reading = decode(None, DECODE)
    assert reading.pool is None
    assert reading.rejection is not None
    assert (reading.rejection.reason, reading.replicas) == (Reason.PEER_MISSING, 2)


def test_an_unreadable_peer() -> None:
    broken = served(PREFILL)
    broken["spec"]["model"] = 5
    reading = validate_set(broken, [served(DECODE)])
    assert reading.prefill is not None
    assert reading.prefill.rejection is not None
    assert reading.prefill.rejection.reason is Reason.INVALID_SPEC
    assert reading.decodes["d"].rejection is not None


def args(*words: str) -> dict[str, Any]:
    return {"engine": {"extraArgs": list(words)}}


EAGLE = '{"method": "eagle3", "model": "x"}'
NGRAM = '{"method": "ngram"}'


@pytest.mark.parametrize(
    ("prefill", "decode_", "fault"),
    [
        ({"engine": {"dtype": "bfloat16"}}, {"engine": {"dtype": "float16"}},
         'engine.dtype is "float16" here and "bfloat16" in PrefillPool p: both sides of a hand-off'
         " must agree; leave it out of DecodePool d to inherit it, or change it in both"),
        ({}, {"engine": {"kvCacheDtype": "fp8"}}, 'engine.kvCacheDtype is "fp8" here and "auto"'),
        ({"engine": {"version": "0.32.0"}}, {"engine": {"version": "0.31.0"}}, "engine.version is"),
        (args("--attention-backend", "FLASH_ATTN"), {},
         'engine.extraArgs --attention-backend is left out here and "FLASH_ATTN" in PrefillPool p'),
        (args("--speculative-config", EAGLE), args("--speculative-config", NGRAM),
         'engine.extraArgs --speculative-config is left out here and "eagle3"'),
        ({}, args("--kv_cache_dtype=fp8"), "engine.extraArgs --kv-cache-dtype"),
        ({}, args("--disable-hybrid-kv-cache-manager"), "--disable-hybrid-kv-cache-manager"),
        ({}, {"engine": {"env": [{"name": "VLLM_KV_CACHE_LAYOUT", "value": "NHD"}]}},
         "engine.env VLLM_KV_CACHE_LAYOUT"),
        ({"accelerator": {"count": 4}}, {"accelerator": {"count": 3}},
         "parallelism.tensor is 3 here and 4 in PrefillPool p: both sides of a hand-off must agree;"
         " one must be a multiple of the other"),
        ({"accelerator": {"count": 1, "type": "H100"}}, {"accelerator": {"count": 1, "type": "L4"}},
         "pin it in both, like extraArgs [--attention-backend, FLASH_ATTN]"),
    ],
)  # fmt: skip
def test_a_mismatch_is_reported(
    prefill: dict[str, Any], decode_: dict[str, Any], fault: str
) -> None:
    rejection = decode(prefill_pool(**prefill), decode_pool(**decode_)).rejection
    assert rejection is not None
    assert rejection.reason is Reason.MISMATCH
    assert len(rejection.faults) == 1
    assert fault in rejection.message


@pytest.mark.parametrize(
    ("prefill", "decode_"),
    [
        (args("--speculative-config", NGRAM), {}),
        (args("--speculative-config", EAGLE), args("--speculative-config", EAGLE)),
        (args("--max-log-len", "5"), {}),
        ({"accelerator": {"count": 4}}, {"accelerator": {"count": 2}}),
        ({"accelerator": {"count": 1, "type": "H100"}, **args("--attention-backend", "FLASH_ATTN")},
         {"accelerator": {"count": 1, "type": "L4"}, **args("--attention-backend=FLASH_ATTN")}),
    ],
)  # fmt: skip
def test_fields_that_may_differ(prefill: dict[str, Any], decode_: dict[str, Any]) -> None:
    assert decode(prefill_pool(**prefill), decode_pool(**decode_)).rejection is None


def test_equal_kv_flags_change_the_compat_hash() -> None:
    def compat(**spec: Any) -> str:
        pool = validate_set(served(prefill_pool(**spec)), []).prefill
        assert pool is not None
        assert pool.pool is not None
        return pool.pool.compat

    assert compat(**args("--speculative-config", EAGLE)) != compat()
    assert compat(**args("--max-log-len", "5")) == compat()


def test_the_torch_engine_inherited_runs_on_one_device() -> None:
    torch = prefill_pool(
        engine={"type": "torch"}, accelerator=None, model={"name": "m", "source": {"path": "/m"}}
    )
    rejection = decode(torch, decode_pool(accelerator=None, parallelism={"tensor": 2})).rejection
    assert rejection is not None
    assert "runs on one device" in rejection.message
    assert "inherited from PrefillPool p" in rejection.message
    assert decode(torch, decode_pool(accelerator=None)).rejection is None


@pytest.mark.parametrize(
    ("prefill", "decode_", "named"),
    [
        ({"transfer": {"requireRdma": True}}, {}, True),
        ({"transfer": {"requireRdma": True}}, {"transfer": {"requireRdma": True}}, False),
        ({"engine": {"version": "0.9.0"}}, {}, True),
        ({"engine": {"image": "vllm/vllm-openai:v0.9.0"}}, {}, True),
        ({"engine": {"version": "0.9.0"}}, {"engine": {"version": "0.9.0"}}, False),
        ({"engine": {"type": "torch"}, "transfer": {"extraConfig": {"lease": 1}}}, {}, True),
    ],
)
def test_a_bad_setting_that_is_inherited_names_its_prefill_pool(
    prefill: dict[str, Any], decode_: dict[str, Any], named: bool
) -> None:
    rejection = decode(prefill_pool(**prefill), decode_pool(**decode_)).rejection
    assert rejection is not None
    assert rejection.reason is Reason.INVALID_SPEC
    origin = "(inherited from PrefillPool p)"
    assert (origin in rejection.message) is named, rejection.message
