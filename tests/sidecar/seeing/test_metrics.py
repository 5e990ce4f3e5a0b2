from tandem_sidecar.seeing.metrics import Metrics


def test_labels_are_bounded() -> None:
    metrics = Metrics()
    for i in range(2000):
        metrics.unified(f"reason_{i}")
        metrics.prefill(f"pod-{i}", 0.1)
    metrics.unified("Not a label\n")
    page = metrics.page().decode()
    assert page.count("tandem_sidecar_unified_total{") <= 33
    assert page.count("disaggregated_prefill_duration_seconds_count{") == 1001
    assert 'tandem_sidecar_unified_total{reason="other"}' in page
    assert "Not a label" not in page
