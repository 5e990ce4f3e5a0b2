"""Write the tables of the docs that come from the code: `.venv/bin/python docs/generate.py`.

    reference/llm-d.md       llm-d's flags, plugins and metrics, and what becomes of each
    reference/api-paths.md   the paths that clients may request
    understand/resume.md     how another engine goes on with a stream, by the request's fields

A table stands between two marker lines. tests/test_docs.py fails when one is out of date.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tandem_contract.api_paths import API
from tandem_contract.llmd_flags import LlmdFlag
from tandem_contract.request_kinds import RequestKind
from tandem_epp.llmd import flags as epp
from tandem_epp.llmd.metrics.table import EXPORTED, MISSING, Exported, Missing
from tandem_epp.llmd.plugins.plugin_types import Kind, Plugin
from tandem_epp.llmd.plugins.registry import PLUGINS
from tandem_epp.llmd.plugins.unsupported import REFUSED
from tandem_sidecar import llmd_flags as sidecar
from tandem_sidecar.resume.rules import ANY, FIELDS, ONCE, PARSED, Method

DOCS = Path(__file__).parent
REFERENCE = DOCS / "reference"
RESUMED = tuple(kind for kind in RequestKind if kind in ONCE)
"""The APIs whose streams another engine goes on with."""


def generated() -> Iterator[tuple[Path, str]]:
    """Each page with its current text."""
    page = REFERENCE / "llm-d.md"
    yield (
        page,
        _with_tables(
            page.read_text(encoding="utf-8"),
            {
                "flags": _flags(epp.FLAGS),
                "plugins": _plugins(),
                "flags of the sidecar": _flags(sidecar.FLAGS),
                "metrics": _metrics(),
            },
        ),
    )
    page = REFERENCE / "api-paths.md"
    rows = (f"| `{path}` | {purpose} |" for path, purpose in API.items())
    table = ["", "| path | purpose |", "|---|---|", *rows, ""]
    yield page, _with_tables(page.read_text(encoding="utf-8"), {"API paths": table})
    page = DOCS / "understand" / "resume.md"
    yield page, _with_tables(page.read_text(encoding="utf-8"), {"fields": _resumed_fields()})


def _with_tables(page: str, tables: Mapping[str, Iterable[str]]) -> str:
    for name, lines in tables.items():
        begin, end = f"<!-- {name}: written by make generate -->\n", f"<!-- end of {name} -->"
        before, found, rest = page.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found and found_end):
            raise ValueError(f"a page has no lines {begin!r} and {end!r}")
        page = "".join((before, begin, *(f"{line}\n" for line in lines), end, after))
    return page


def _flags(flags: Iterable[LlmdFlag]) -> Iterator[str]:
    yield from ("| flag | here | what it does, or why not |", "|---|---|---|")
    for flag in flags:
        name = f"`{'-' if flag.name == 'v' else '--'}{flag.name}`"
        default = f" ({flag.default})" if flag.default else ""
        yield f"| {name}{default} | {flag.treatment} | {flag.text} |"


def _plugins() -> Iterator[str]:
    yield from ("| plugin | here | what it does, or why not |", "|---|---|---|")
    for plugin in PLUGINS:
        treatment = plugin.kind if plugin.kind in (Kind.NOT_NEEDED, Kind.NO_EFFECT) else "works"
        yield f"| `{plugin.type_name}` | {treatment} | {plugin.help} |"
    for name, refused in REFUSED.items():
        yield f"| `{name}` | refused | {refused.reason}; nearest: `{refused.nearest}` |"
    yield from ("", "Parameters, with their defaults:", "")
    yield from ("| plugin | kind | parameters |", "|---|---|---|")
    for plugin in PLUGINS:
        if parameters := "<br>".join(_parameters(plugin)):
            yield f"| `{plugin.type_name}` | {plugin.kind} | {parameters} |"


def _parameters(plugin: Plugin[Any]) -> Iterator[str]:
    """Name, default and description of each parameter."""
    definitions = msgspec.json.schema(plugin.parameters)["$defs"]
    for name, schema in definitions[plugin.parameters.__name__]["properties"].items():
        default = schema.get("default")
        is_shown = default not in (None, "", [], ()) and not isinstance(default, dict)
        text = str(default).lower() if isinstance(default, bool) else str(default)
        yield f"`{name}`{f' ({text})' if is_shown else ''}: {schema['description']}"


def _metrics() -> Iterator[str]:
    yield from ("| `llm_d_epp_…` | older name | here | Tandem's own |", "|---|---|---|---|")
    yield from map(_exported, EXPORTED)
    yield from map(_missing, MISSING)


def _exported(metric: Exported) -> str:
    older = f"`{metric.names.older}`" if metric.names.older else ""
    ours = (f"`{part}`" if "_" in part else part for part in metric.ours.split(", ") if part)
    here = f"exported; {metric.difference}" if metric.difference else "exported"
    return f"| `{metric.names.name}` | {older} | {here} | {', '.join(ours)} |"


def _missing(metric: Missing) -> str:
    names = ", ".join(f"`{name}`" for name in metric.names)
    return f"| {names} | | not exported: {metric.reason} | {metric.ours} |"


def _resumed_fields() -> Iterator[str]:
    """A row for the fields that all APIs treat alike."""
    yield f"| field | {' | '.join(RESUMED)} |"
    yield f"|---|{'---|' * len(RESUMED)}"
    names = {name for fields in (*FIELDS.values(), *ONCE.values()) for name in fields}
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(names - {"stream"}):
        rows.setdefault(tuple(_resumed(kind, name) for kind in RESUMED), []).append(f"`{name}`")
    for cells, alike in rows.items():
        yield f"| {', '.join(alike)} | {' | '.join(cells)} |"
    yield f"| any other | {' | '.join([Method.AGAIN] * len(RESUMED))} |"


def _resumed(kind: RequestKind, name: str) -> str:
    """What becomes of a stream whose request has this field."""
    allowed, once = FIELDS.get(kind, {}).get(name, ()), ONCE[kind].get(name)
    if allowed is ANY:
        return Method.CONTINUED
    other = Method.AGAIN if once is None else Method.NO
    if kind is RequestKind.CHAT and name in PARSED:
        other = Method.PARSED
    cells = []
    if isinstance(allowed, tuple) and allowed:
        cells.append(f"{_values(allowed)}: {Method.CONTINUED}")
    if once:
        cells.append(f"{_values(once)}: {Method.AGAIN}")
    return "; ".join((*cells, f"else {other}" if cells else other))


def _values(values: Iterable[Any]) -> str:
    return ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in values)


if __name__ == "__main__":
    for file, text in generated():
        file.write_text(text, encoding="utf-8")
