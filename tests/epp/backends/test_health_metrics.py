"""What Prometheus gets to see of failing backends."""

from tandem_epp.backends.health import EJECT_IN_A_ROW
from tandem_epp.backends.outcomes import Outcome

from ..placement.test_picker import NOW, PickerSetup


def test_outcomes_and_ejections_are_exported_per_backend_and_leave_with_it() -> None:
    setup = PickerSetup(d1="decode", d2="decode")
    ejections = setup.fleet.ejections
    ejections.record(setup["d2"], Outcome.ANSWERED, NOW, NOW)
    for _ in range(EJECT_IN_A_ROW):
        ejections.record(setup["d1"], Outcome.ERROR, NOW, NOW)

    def sample(name: str, **labels: str) -> float | None:
        return setup.metrics.registry.get_sample_value(f"tandem_epp_{name}", labels)

    assert sample("outcomes_total", backend="d1", outcome="error") == EJECT_IN_A_ROW
    assert sample("outcomes_total", backend="d2", outcome="answered") == 1
    for backend, value in (("d1", 1), ("d2", 0)):
        assert sample("ejected", backend=backend) == value
        assert sample("ejections_total", backend=backend) == value
        assert sample("backend_healthy", backend=backend) == 1 - value
    assert sample("failure_rate", backend="d1") == EJECT_IN_A_ROW / 5
    setup.fleet.apply([])
    assert sample("ejected", backend="d1") is None
