"""The Grafana dashboard: its queries parse and read exported series."""

import json
from pathlib import Path
from typing import Any

import pytest

from . import programs, promql
from .exported import exported_series

VARIABLES = {"datasource", "namespace", "endpoint", "pool"}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in programs.dashboard()["panels"] if panel["type"] != "row"]


def queries() -> list[tuple[str, str]]:
    """Title and expression of each panel, with Grafana's variables filled in."""
    return [
        (panel["title"], _filled(target["expr"]))
        for panel in panels()
        for target in panel["targets"]
    ]


def _filled(expression: str) -> str:
    for name in VARIABLES:
        expression = expression.replace(f"${name}", ".*")
    return expression.replace("$__rate_interval", "5m")


@pytest.mark.component
@pytest.mark.usefixtures("promtool")
def test_promtool_parses_every_query(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{i}", "expr": expression} for i, (_, expression) in enumerate(queries())
    ]
    wrapped = tmp_path / "queries.json"
    wrapped.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    programs.promtool("check", "rules", wrapped)


@pytest.mark.parametrize(("title", "expression"), queries())
def test_queries_read_exported_series(title: str, expression: str) -> None:
    exported = exported_series()
    read = promql.series(expression)
    assert read
    assert read <= exported.keys(), title
    for series, labels in promql.matched_labels(expression).items():
        assert labels <= exported[series], title
    assert promql.grouped_labels(expression) <= frozenset.union(*(exported[s] for s in read)), title


def test_panels_have_descriptions_and_legends_of_labels_they_group_by() -> None:
    for panel in panels():
        assert panel["description"], panel["title"]
        for target in panel["targets"]:
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            legend = set(promql.legend_labels(target["legendFormat"]))
            assert legend <= promql.grouped_labels(target["expr"]), panel["title"]


def test_variables_exist_and_are_used() -> None:
    board = programs.dashboard()
    assert {variable["name"] for variable in board["templating"]["list"]} == VARIABLES
    text = json.dumps(board["panels"])
    assert all(f"${name}" in text or f"${{{name}}}" in text for name in VARIABLES)


def test_panels_do_not_overlap() -> None:
    places = [
        (x, y)
        for panel in programs.dashboard()["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(places) == len(set(places))
    assert max(x for x, _ in places) < 24
