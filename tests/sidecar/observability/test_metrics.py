from tandem_contract import metrics as names
from tandem_contract.paths import ErrorPhase, RoutingPath
from tandem_sidecar.observability.metrics import Metrics


def test_labels_are_bounded() -> None:
    metrics = Metrics()
    for i in range(2000):
        metrics.count_unified(f"reason_{i}")
        metrics.prefill.child(f"pod-{i}").observe(0.1)
    metrics.count_unified("Not a label\n")
    page = metrics.page().decode()
    assert page.count("tandem_sidecar_unified_total{") <= 33
    assert page.count("disaggregated_prefill_duration_seconds_count{") == 1001
    assert 'tandem_sidecar_unified_total{reason="other"}' in page
    assert "Not a label" not in page


def test_the_disaggregated_metrics_are_exported_from_the_start() -> None:
    page = Metrics().page().decode()
    for path in RoutingPath:
        assert f'{names.REQUESTS}{{routing_path="{path.value}"}} 0.0' in page
    for phase in ErrorPhase:
        assert f'{names.ERRORS}{{phase="{phase.value}"}} 0.0' in page
    assert f"{names.FALLBACKS} 0.0" in page
    assert f"{names.KV_TRANSFER_SECONDS}_count 0.0" in page
    for name in (names.PREFILL_SECONDS, names.DECODE_SECONDS):
        assert f"# TYPE {name} histogram" in page


def test_a_gauge_is_computed_at_each_scrape() -> None:
    metrics, values = Metrics(), {"a": 1.0}
    metrics.add_gauge("x", "Help.", lambda: [((k,), v) for k, v in values.items()], ["name"])
    assert 'x{name="a"} 1.0' in metrics.page().decode()
    values["b"] = 2.0
    assert 'x{name="b"} 2.0' in metrics.page().decode()
