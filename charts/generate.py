"""Generate the chart's copies and documentation: `.venv/bin/python charts/generate.py`.

    crds/*.yaml              -> files/crds/             templates can only read files of the chart
    values.yaml's comments   -> values.schema.json      `# path: text` is that path's description
    values.yaml              -> README.md               the table of values

tests/chart/test_generated.py fails when the generated files are out of date.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
CHART = ROOT / "charts/tandem"
_DESCRIBED = re.compile(r"^ *# ([A-Za-z.]+): (.+)$", re.MULTILINE)
_TABLE = re.compile(r"(?<=<!-- values -->\n).*(?=<!-- /values -->)", re.DOTALL)


def generated() -> Iterator[tuple[Path, str]]:
    """Each generated file with its content."""
    for crd in sorted((ROOT / "crds").glob("*.yaml")):
        yield CHART / "files/crds" / crd.name, crd.read_text()
    values = (CHART / "values.yaml").read_text()
    texts = dict(_DESCRIBED.findall(values))
    schema = json.loads((CHART / "values.schema.json").read_text())
    yield CHART / "values.schema.json", json.dumps(_described(schema, texts), indent=2) + "\n"
    table = "".join(_rows(YAML(typ="safe").load(values), texts))
    head = "| value | default | |\n|---|---|---|\n"
    readme = (CHART / "README.md").read_text()
    yield CHART / "README.md", _TABLE.sub(lambda _: head + table, readme)


def _described(node: dict[str, Any], texts: Mapping[str, str], path: str = "") -> dict[str, Any]:
    """The schema with each property's description, first among its keywords."""
    description = {"description": texts[path]} if path in texts else {}
    others = {key: value for key, value in node.items() if key not in description}
    if properties := others.get("properties"):
        others["properties"] = {
            name: _described(child, texts, f"{path}.{name}".lstrip("."))
            for name, child in properties.items()
        }
    return description | others


def _rows(values: Any, texts: Mapping[str, str], path: str = "") -> Iterator[str]:
    """A line of Markdown for each described value. Raises KeyError for one without a comment."""
    if path in texts:
        yield f"| `{path}` | `{json.dumps(values)}` | {texts[path]} |\n"
    elif isinstance(values, dict):
        for name, value in values.items():
            yield from _rows(value, texts, f"{path}.{name}".lstrip("."))
    else:
        raise KeyError(f"values.yaml: {path} has no comment `# {path}: …`")


if __name__ == "__main__":
    for file, content in generated():
        file.write_text(content)
