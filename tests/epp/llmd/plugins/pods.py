"""Pods for tests of filters and scorers."""

from tandem_contract.config import Backend
from tandem_contract.paths import Role
from tandem_epp.backends.engine_page import ScrapeResult
from tandem_epp.backends.pods import DiscoveredBackend, Pod
from tandem_epp.estimates.engine_figures import Gauges


def make_pod(
    name: str = "pod",
    *,
    role: Role = Role.UNIFIED,
    labels: dict[str, str] | None = None,
    gauges: Gauges | None = None,
) -> Pod:
    """A pod that was scraped if `gauges` are given."""
    pod = Pod(Backend(name=name, url="http://127.0.0.1:1", role=role, labels=labels or {}))
    if gauges is not None:
        pod.apply_scrape(ScrapeResult(gauges, b""))
    return pod


def discovered(name: str, host: int) -> DiscoveredBackend:
    """A backend as discovery finds it, at 10.0.0.`host`."""
    return DiscoveredBackend(Backend(name=name, url=f"http://10.0.0.{host}:8000"))
