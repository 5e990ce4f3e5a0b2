"""The doctor's findings about the external store of engines that run."""

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tandem_contract.metrics_page import MetricsPage
from tandem_contract.paths import Role
from tandem_doctor.checks import run_checks
from tandem_doctor.facts import Engine, Facts, StorageUse
from tandem_doctor.findings import Finding, Severity
from tandem_doctor.storage_use import read_storage_use
from tandem_engine.tier_metrics import TierMetrics
from tandem_kvstore.errors import Reason
from tandem_kvstore.guard.breaker import BreakerState

REFUSED = "no connection to the store: Connection refused"


def use_of(metrics: TierMetrics, registry: CollectorRegistry) -> StorageUse | None:
    return read_storage_use(MetricsPage.parse(generate_latest(registry).decode()))


def test_the_torch_engines_page() -> None:
    registry = CollectorRegistry()
    page = TierMetrics(registry, ("m", "0"))
    assert use_of(page, registry) is None
    page.record_breaker(BreakerState.CLOSED)
    assert use_of(page, registry) == StorageUse(True)
    page.record_not_stored(Reason.FULL)
    assert use_of(page, registry) == StorageUse(True, full_chunks=1.0)
    page.record_failure("no answer in time")
    page.record_failure(REFUSED)
    page.record_breaker(BreakerState.OPEN)
    assert use_of(page, registry) == StorageUse(False, REFUSED, 1.0)


def test_the_page_of_vllm_with_two_ranks() -> None:
    lines = (
        'tandem_vllm_storage_breaker_state{engine="0"} 0.0',
        'tandem_vllm_storage_breaker_state{engine="1"} 2.0',
        'tandem_vllm_storage_failure{engine="1",message="the store answered 503"} 1.0',
        'tandem_vllm_storage_not_stored_chunks_total{engine="0",reason="full"} 2.0',
        "",
    )
    page = MetricsPage.parse("\n".join(lines))
    assert read_storage_use(page) == StorageUse(False, "the store answered 503", 2.0)


def finding_of(use: StorageUse | None) -> list[Finding]:
    engine = Engine("unified-0", Role.UNIFIED, "m", "10.0.0.1:8000")
    facts = Facts((replace(engine, storage=use),), (), ())
    return [finding for finding in run_checks(facts) if finding.check == "storage"]


@pytest.mark.parametrize(
    ("use", "severity", "text"),
    [
        (StorageUse(True), Severity.OK, "uses its external store"),
        (StorageUse(True, "no answer in time"), Severity.OK, "uses its external store"),
        (StorageUse(False, REFUSED), Severity.BROKEN, f"external store: {REFUSED}"),
        (StorageUse(False), Severity.BROKEN, "instead of using its external store"),
        (
            StorageUse(True, "", 3.0),
            Severity.WARNING,
            "3 chunks were not stored since",
        ),
    ],
)
def test_findings(use: StorageUse, severity: Severity, text: str) -> None:
    (finding,) = finding_of(use)
    assert finding.severity is severity
    assert text in finding.detail


def test_an_engine_without_a_store_has_no_finding() -> None:
    assert finding_of(None) == []
