"""Writes the tables of scheduling plugins in docs/reference/llm-d.md from the registry.

    python -m tandem_epp.llmd.plugins.reference     part of `make generate`

The tables stand between two marker lines. A test compares them with `plugin_tables()`.
"""

from pathlib import Path
from typing import Any, Final

import msgspec

from .plugin_types import AcceptedType, PluginType
from .registry import PLUGINS
from .unsupported import REFUSED

PAGE: Final = Path(__file__).parents[4] / "docs" / "reference" / "llm-d.md"
BEGIN: Final = "<!-- plugins: written by make generate -->"
END: Final = "<!-- end of plugins -->"


def plugin_tables() -> str:
    """The tables in Markdown: every plugin and how it is treated, then the parameters."""
    return "\n".join(
        [
            "| plugin | here | what it does, or why not |",
            "|---|---|---|",
            *(_treatment_row(plugin) for plugin in PLUGINS),
            *(
                f"| `{name}` | refused | {refused.reason}; nearest: `{refused.nearest}` |"
                for name, refused in REFUSED.items()
            ),
            "",
            "Parameters, with their defaults:",
            "",
            "| plugin | kind | parameters |",
            "|---|---|---|",
            *(_parameter_row(plugin) for plugin in PLUGINS if _parameters(plugin.parameters)),
            "",
        ]
    )


def with_tables(page: str) -> str:
    """`page` with current tables. Raises ValueError without the two marker lines."""
    before, begin, rest = page.partition(BEGIN + "\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name}: the marker lines {BEGIN!r} and {END!r} are missing")
    return f"{before}{BEGIN}\n{plugin_tables()}{END}{after}"


def _treatment_row(plugin: PluginType[Any]) -> str:
    if not isinstance(plugin, AcceptedType):
        return f"| `{plugin.type_name}` | works | {plugin.help} |"
    treatment = "accepted without effect" if plugin.is_lost else "accepted, not needed"
    return f"| `{plugin.type_name}` | {treatment} | {plugin.help} |"


def _parameter_row(plugin: PluginType[Any]) -> str:
    parameters = "<br>".join(_parameters(plugin.parameters))
    return f"| `{plugin.type_name}` | {plugin.kind} | {parameters} |"


def _parameters(parameters: type[msgspec.Struct]) -> list[str]:
    """One line for each parameter: name, default, and the description in its Meta."""
    lines = []
    properties = msgspec.json.schema(parameters)["$defs"][parameters.__name__]["properties"]
    for name, schema in properties.items():
        default = schema.get("default")
        is_shown = default not in (None, "", [], ()) and not isinstance(default, dict)
        shown = f" ({_text(default)})" if is_shown else ""
        lines.append(f"`{name}`{shown}: {schema['description']}")
    return lines


def _text(default: object) -> str:
    """As YAML writes it."""
    return str(default).lower() if isinstance(default, bool) else str(default)


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)  # noqa: T201 - a command


if __name__ == "__main__":
    main()
