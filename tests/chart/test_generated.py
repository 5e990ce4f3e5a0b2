"""Copies in the chart equal their sources."""

import importlib.util
import json
import tomllib

from .programs import CHART, documents

ROOT = CHART.parents[1]


def test_generated_files_are_fresh() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "charts/generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    written = dict(generate.generated())
    stale = [
        str(file) for file, text in written.items() if not file.exists() or file.read_text() != text
    ]
    assert stale == [], "run .venv/bin/python charts/generate.py"
    crds = set((CHART / "files/crds").iterdir())
    assert crds <= written.keys(), "the chart contains a CRD that crds/ does not"


def test_chart_is_of_this_release() -> None:
    [chart] = documents((CHART / "Chart.yaml").read_text())
    released = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert chart["appVersion"] == released
    assert chart["version"].replace("-", ".") == released


def test_every_value_is_in_the_schema_with_a_description() -> None:
    [values] = documents((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def undescribed(value: object, node: dict[str, object], path: str) -> list[str]:
        if "description" in node:
            return []
        properties = node.get("properties")
        if not isinstance(value, dict) or not isinstance(properties, dict):
            return [path]
        assert node["additionalProperties"] is False, path
        return [
            name_path
            for name, child in value.items()
            for name_path in undescribed(child, properties[name], f"{path}.{name}")
        ]

    assert undescribed(values, schema, "") == []
