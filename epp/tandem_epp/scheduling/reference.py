"""Writes the table of scheduling plugins in docs/epp.md from the registry.

    python -m tandem_epp.scheduling.reference     part of `make generate`

The table stands between two marker lines. A test compares it with `plugin_table()`.
"""

from pathlib import Path
from typing import Any, Final

import msgspec

from .registry import PLUGINS, AcceptedType, PluginType

PAGE: Final = Path(__file__).parents[3] / "docs" / "epp.md"
BEGIN: Final = "<!-- plugins: written by make generate -->"
END: Final = "<!-- end of plugins -->"


def plugin_table() -> str:
    """The table in Markdown, one row per plugin that has an effect, then the names of the rest."""
    rows = [
        "| type | kind | what it does | parameters |",
        "|---|---|---|---|",
        *(_row(plugin) for plugin in PLUGINS if not isinstance(plugin, AcceptedType)),
    ]
    accepted = ", ".join(f"`{p.type_name}`" for p in PLUGINS if isinstance(p, AcceptedType))
    note = f"Accepted without effect, because the EPP always does what they do: {accepted}."
    return "\n".join(rows) + f"\n\n{note}\n"


def with_table(page: str) -> str:
    """`page` with a current table. Raises ValueError without the two marker lines."""
    before, begin, rest = page.partition(BEGIN + "\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name}: the marker lines {BEGIN!r} and {END!r} are missing")
    return f"{before}{BEGIN}\n{plugin_table()}{END}{after}"


def _row(plugin: PluginType[Any]) -> str:
    parameters = "<br>".join(_parameters(plugin.parameters))
    cells = (f"`{plugin.type_name}`", plugin.kind, plugin.help)
    return f"| {' | '.join(cells)} | {parameters} |"


def _parameters(parameters: type[msgspec.Struct]) -> list[str]:
    """One line for each parameter: name, default, and the description in its Meta."""
    lines = []
    properties = msgspec.json.schema(parameters)["$defs"][parameters.__name__]["properties"]
    for name, schema in properties.items():
        default = schema.get("default")
        shown = "" if default is None or isinstance(default, dict) else f" ({default})"
        lines.append(f"`{name}`{shown}: {schema['description']}")
    return lines


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)  # noqa: T201 - a command


if __name__ == "__main__":
    main()
