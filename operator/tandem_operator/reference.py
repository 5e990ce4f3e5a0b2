"""Generates the reference pages of the custom resources from their CRDs.

    python -m tandem_operator.reference          writes docs/reference/*.md of this checkout

A test compares the pages with the CRDs and fails when one was changed without the other.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from .crd import KINDS, LIST_TYPE, PRESERVE_UNKNOWN, RULES, load_crd, schema_version

COMMAND: Final = "python -m tandem_operator.reference"
PAGES: Final = Path(__file__).parents[2] / "docs" / "reference"

Node = Mapping[str, Any]

_UNBOUNDED: Final = 2**31 - 1
"""The largest int32: as a maximum it is no limit worth showing."""


def page(kind: str) -> str:
    """The page of one of `crd.KINDS`, as Markdown."""
    crd = load_crd(kind)
    names, (version,) = crd["spec"]["names"], crd["spec"]["versions"]
    short, categories = (
        ", ".join(f"`{name}`" for name in names[key]) for key in ("shortNames", "categories")
    )
    schema = version["schema"]["openAPIV3Schema"]
    lines = [
        f"<!-- Written by `{COMMAND}` from crds/{names['plural']}.yaml: change that. -->",
        f"# {kind}",
        "",
        schema["description"],
        "",
        f"`{crd['spec']['group']}/{version['name']}`, {crd['spec']['scope'].lower()};"
        f" `kubectl get {names['plural']}`, short {short}, category {categories}."
        f" Schema {schema_version()}."
        " No field is immutable: a rollout carries out every change.",
        "",
        f"`metadata.name`: {schema['properties']['metadata']['properties']['name']['description']}",
        "",
        *_section("Spec", "spec", schema["properties"]["spec"]),
        *_section("Status", "status", schema["properties"]["status"]),
        *_columns(version["additionalPrinterColumns"]),
    ]
    return "\n".join(lines)


def write(folder: Path = PAGES) -> list[Path]:
    """Write every page into `folder`. Returns the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{kind.lower()}.md" for kind in KINDS]
    for kind, file in zip(KINDS, files, strict=True):
        file.write_text(page(kind), encoding="utf-8")
    return files


def _section(title: str, path: str, node: Node) -> Iterator[str]:
    """A table of the fields of `node`, then a table for each mapping or list of mappings in it."""
    yield from (f"## {title}", "", node["description"], "")
    yield from _table(node)
    yield from _rules(node)
    yield from _subsections(path, node)


def _subsections(path: str, node: Node) -> Iterator[str]:
    for name, field in node.get("properties", {}).items():
        inner, at = _item(field, f"{path}.{name}")
        if inner.get("properties"):
            yield from (f"### `{at}`", "")
            yield from _table(inner)
            yield from _rules(inner)
            yield from _subsections(at, inner)


def _item(field: Node, path: str) -> tuple[Node, str]:
    """Schema and path of a list's items; of any other field, the field itself."""
    return (field["items"], f"{path}[]") if "items" in field else (field, path)


def _table(node: Node) -> Iterator[str]:
    yield from ("| field | type | default | description |", "|---|---|---|---|")
    required = node.get("required", ())
    for name, field in node["properties"].items():
        needed = "**required**" if name in required else _default(field)
        described = [field["description"], *_limits(field)]
        yield f"| `{name}` | {_type(field)} | {needed} | {_cell(' '.join(described))} |"
    yield ""


def _type(field: Node) -> str:
    if "enum" in field:
        return " \\| ".join(f"`{_plain(choice)}`" for choice in field["enum"])
    if field.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if "items" in field:
        kind = field[LIST_TYPE]
        return f"{kind if kind == 'set' else 'list'} of {_type(field['items'])}"
    if "additionalProperties" in field:
        return f"map of {_type(field['additionalProperties'])}"
    if field.get(PRESERVE_UNKNOWN):
        return "object, free"
    return str(field.get("format") if field.get("format") == "date-time" else field["type"])


def _default(field: Node) -> str:
    default = field.get("default")
    # A default of {} only makes the API server fill in the defaults inside the mapping.
    return "" if default in (None, {}) else f"`{_plain(default)}`"


def _limits(field: Node) -> Iterator[str]:
    """Limits of the values; patterns and maximum lengths are explained by the descriptions."""
    low, high = field.get("minimum"), field.get("maximum")
    if low is not None and high is not None:
        if field.get("exclusiveMinimum"):
            yield f"Above {low}, at most {high}."
        else:
            yield f"{low} to {high}." if high < _UNBOUNDED else f"At least {low}."
    for name, unit in (("maxItems", "items"), ("maxProperties", "entries")):
        if name in field:
            yield f"At most {field[name]} {unit}."


def _rules(node: Node) -> Iterator[str]:
    """Rules of the node and of its scalar fields, each with the field it is about."""
    rules = [(rule.get("fieldPath", "").strip("."), rule) for rule in node.get(RULES, ())]
    for name, field in node["properties"].items():
        if not _item(field, "")[0].get("properties"):
            rules += [(name, rule) for rule in field.get(RULES, ())]
    if rules:
        yield from ("Rules:", "")
        yield from (f"- {f'`{at}`: ' if at else ''}{rule['message']}" for at, rule in rules)
        yield ""


def _columns(columns: list[Node]) -> Iterator[str]:
    yield from ("## Columns", "", "| column | value | description |", "|---|---|---|")
    for column in columns:
        where = " With `-o wide`." if column.get("priority") else ""
        value = _cell(f"`{column['jsonPath']}`")
        yield f"| {column['name'].upper()} | {value} | {column['description']}{where} |"
    yield ""


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    for path in write():
        print(path)  # noqa: T201 - a command's output
