"""Alerts and recording rules, checked by promtool and against exported series."""

import re
from pathlib import Path
from typing import Any

import pytest

from . import programs, promql
from .exported import exported_series, recorded_series

HERE = Path(__file__).parent
CASES = HERE / "rules.test.yaml"
RUNBOOK = programs.CHART.parents[1]

ALERTS = [rule for rule in programs.rules() if "alert" in rule]


@pytest.mark.component
@pytest.mark.usefixtures("promtool")
def test_promtool_accepts_the_rules() -> None:
    programs.promtool("check", "rules", "--lint-fatal", programs.RULES)


@pytest.mark.component
@pytest.mark.usefixtures("promtool")
def test_alerts_fire_when_they_should() -> None:
    programs.promtool("test", "rules", CASES)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_is_tested_firing_and_silent(rule: dict[str, Any]) -> None:
    [tests] = programs.documents(CASES.read_text())
    cases = [
        case
        for test in tests["tests"]
        for case in test.get("alert_rule_test", [])
        if case["alertname"] == rule["alert"]
    ]
    assert {bool(case["exp_alerts"]) for case in cases} == {True, False}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_has_its_runbook(rule: dict[str, Any]) -> None:
    file, _, anchor = rule["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (RUNBOOK / file).read_text(), re.MULTILINE)
    assert anchor == rule["alert"].lower()
    assert rule["alert"] in headings


@pytest.mark.parametrize(
    "rule", programs.rules(), ids=lambda rule: rule.get("alert") or rule["record"]
)
def test_rules_read_exported_series(rule: dict[str, Any]) -> None:
    exported = exported_series()
    recorded = set(recorded_series(programs.rules()))
    assert promql.series(rule["expr"]) <= exported.keys() | recorded
    for series, labels in promql.matched_labels(rule["expr"]).items():
        assert labels <= exported[series], series
    read = promql.series(rule["expr"]) & exported.keys()
    exported_labels: set[str] = set().union(*(exported[series] for series in read))
    assert promql.grouped_labels(rule["expr"]) <= exported_labels or not read
