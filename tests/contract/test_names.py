"""Names on the wire: their form, and those that may not change."""

import re

from tandem_contract import headers, labels, metrics, ports
from tandem_contract.paths import ErrorPhase, Role, RoutingPath


def constants(module: object) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if name.isupper()}


def test_header_names_are_lower_case_tokens() -> None:
    names = {v for v in constants(headers).values() if isinstance(v, str)} | headers.INTERNAL
    assert all(re.fullmatch(r"[a-z0-9_.-]+", name) for name in names)


def test_a_client_can_set_nothing_that_routes() -> None:
    assert {
        headers.DESTINATION_ENDPOINT, headers.PREFILLER_HOST_PORT, headers.PLAN, headers.TIMING,
        headers.ROUTING_PATH, headers.PREFILL_BACKEND, headers.DECODE_BACKEND,
    } <= headers.INTERNAL  # fmt: skip
    assert not {headers.REQUEST_ID, headers.TRACEPARENT} & headers.INTERNAL


def test_metric_names_are_valid_and_the_six_public_ones_are_exact() -> None:
    names = [v for name, v in constants(metrics).items() if not name.endswith("_LABEL")]
    assert all(re.fullmatch(r"[a-z_:][a-z0-9_:]*", str(name)) for name in names)
    assert {
        "disaggregated_requests_total",
        "disaggregated_prefill_duration_seconds",
        "disaggregated_decode_duration_seconds",
        "disaggregated_kv_transfer_duration_seconds",
        "disaggregated_fallback_total",
        "disaggregated_errors_total",
    } == {name for name in names if str(name).startswith("disaggregated_")}


def test_ports_of_one_pod_do_not_collide() -> None:
    decode = [
        ports.SIDECAR,
        ports.SIDECAR_ADMIN,
        ports.ENGINE_DECODE,
        ports.SIDE_CHANNEL,
        ports.KV_EVENTS,
    ]
    assert len(set(decode)) == len(decode)
    assert all(isinstance(p, int) and 1 <= p <= 65535 for p in constants(ports).values())


def test_label_keys_are_ours() -> None:
    for name in ("POOL", "ROLE", "MODEL", "REVISION", "KV_COMPAT", "DRAINING"):
        assert constants(labels)[name] == f"tandem.dev/{name.lower().replace('_', '-')}"


def test_wire_values_are_exact() -> None:
    assert set(RoutingPath) == {"fast_decode", "prefill_then_decode", "unified", "fallback"}
    assert set(Role) == {"unified", "prefill", "decode"}
    assert set(ErrorPhase) == {"prefill", "decode", "kv_transfer", "orchestration"}


def test_a_role_serves_its_phase_and_unified_serves_both() -> None:
    assert Role.PREFILL.serves(Role.PREFILL)
    assert not Role.PREFILL.serves(Role.DECODE)
    assert Role.DECODE.serves(Role.DECODE)
    assert not Role.DECODE.serves(Role.PREFILL)
    assert Role.UNIFIED.serves(Role.PREFILL)
    assert Role.UNIFIED.serves(Role.DECODE)
