"""Gateways that would send requests on while they wait."""

from typing import Any

from tandem_contract import labels, ports
from tandem_doctor.checks import run_checks
from tandem_doctor.cluster_pods import epps_behind_envoy
from tandem_doctor.facts import EppReport, Facts
from tandem_doctor.findings import Severity
from tandem_doctor.gateways import check_gateway


def test_a_gateway_in_mode_buffered_needs_a_longer_timeout() -> None:
    report = EppReport("epp-0", asked_seconds=90.0)
    [finding] = check_gateway(report)
    assert (finding.severity, finding.subject) == (Severity.WARNING, "epp-0")
    assert "up to 90s" in finding.detail or "up to 1m30s" in finding.detail
    assert "at least 95s" in finding.fix or "at least 1m35s" in finding.fix
    assert finding in run_checks(Facts((), epps=(report,)))


def test_tandems_own_envoy_waits_and_other_modes_have_no_timer() -> None:
    assert not list(check_gateway(EppReport("epp-0")))
    assert not list(check_gateway(EppReport("epp-0", asked_seconds=90.0, is_behind_envoy=True)))


def pod(name: str, component: str, endpoint: str, *declared: int) -> dict[str, Any]:
    names = {labels.COMPONENT: component, labels.ENDPOINT: endpoint}
    listed = [{"containerPort": port} for port in declared]
    return {
        "metadata": {"name": name, "labels": names},
        "spec": {"containers": [{"ports": listed}]},
    }


def test_an_endpoint_with_an_envoy_of_the_operator_is_behind_it() -> None:
    epp = (ports.EPP_GRPC, ports.EPP_METRICS)
    pods = [
        pod("a-epp", "epp", "a", *epp),
        pod("a-envoy", "envoy", "a", ports.ENVOY),
        pod("b-epp", "epp", "b", *epp),
        pod("own-epp", "epp", "", *epp),
        pod("own-envoy", "envoy", ""),
    ]
    assert epps_behind_envoy(pods) == {"a-epp"}
