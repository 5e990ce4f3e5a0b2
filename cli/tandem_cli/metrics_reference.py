"""Writes docs/reference/metrics.md: every metric of Tandem, with the help text of its declaration.

    python -m tandem_cli.metrics_reference     part of `make generate`

Declarations are read from the sources, without running them: a metric that only some configurations
register is there too. A test compares the page with `page()`.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "reference" / "metrics.md"
COMPONENTS: Final = {
    "EPP": "epp/tandem_epp",
    "Sidecar": "sidecar/tandem_sidecar",
    "Router": "router/tandem_router",
    "Operator": "operator/tandem_operator",
    "Reference engine": "engine/tandem_engine",
    "vLLM's storage connector": "vllm_storage/tandem_vllm_storage",
}
KINDS: Final = re.compile("counter|gauge|histogram|family|vec|metric|^_by$", re.IGNORECASE)
"""Names of what declares a metric."""
PREFIXES: Final = ("tandem_", "disaggregated_")
"""Metrics under names of others (`vllm:`, `llm_d_epp_`) are described by those."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """A metric as its constructor names it."""

    name: str
    help: str
    labels: tuple[str, ...]


def declarations(folder: Path, constants: Mapping[str, str]) -> Iterator[Declaration]:
    """Calls whose first arguments are a metric's name and its help text, in order of the files."""
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(
                    func=ast.Name(id=kind) | ast.Attribute(attr=kind), args=[first, second, *_]
                ) if KINDS.search(kind):
                    name, text = _text(first, constants), _text(second, constants)
                    if name and text and name.startswith(PREFIXES):
                        # Prometheus' clients add the suffix to counters that lack it.
                        is_bare = "counter" in kind.lower() and not name.endswith("_total")
                        shown = f"{name}_total" if is_bare else name
                        yield Declaration(shown, text, tuple(_labels(node, constants)))


def string_constants() -> dict[str, str]:
    """Values of the upper-case names that modules of Tandem assign strings to."""
    found = {}
    for folder in ("contract/tandem_contract", *COMPONENTS.values()):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                match node:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=str(text)))
                        | ast.Assign(
                            targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))
                        )
                    ) if name.isupper():
                        found[name] = text
    return found


def _text(node: ast.expr, constants: Mapping[str, str]) -> str | None:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return constants.get(name)
    return None


def _labels(call: ast.Call, constants: Mapping[str, str]) -> Iterator[str]:
    """The last list or tuple of strings among the arguments: buckets hold numbers."""
    lists = [*call.args[2:], *(keyword.value for keyword in call.keywords)]
    for each in lists:
        if isinstance(each, ast.List | ast.Tuple):
            texts = [_text(element, constants) for element in each.elts]
            yield from (text for text in texts if text)


def page() -> str:
    """The page in Markdown."""
    constants = string_constants()
    parts = [
        "<!-- Written by `python -m tandem_cli.metrics_reference` from the sources:"
        " change those. -->",
        "# Metrics",
        "",
        "[Observability](../operate/observability.md) says which port serves them, and how to"
        " collect them. Sums, counts and buckets of histograms are left out.",
    ]
    for title, folder in COMPONENTS.items():
        metrics = {each.name: each for each in declarations(ROOT / folder, constants)}
        if not metrics:
            continue
        parts += ["", f"## {title}", "", "| metric | labels | |", "|---|---|---|"]
        for _, each in sorted(metrics.items()):
            labels = ", ".join(f"`{label}`" for label in each.labels)
            text = each.help.replace("|", "\\|").replace("<", "&lt;")
            parts.append(f"| `{each.name}` | {labels} | {text} |")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
