"""Generates the JSON schema of the report from `model`.

    python -m tandem_loadtest.figures.schema     writes docs/reference/bench-report.schema.json

A test compares the file with the model and fails when one was changed without the other.
"""

import ast
import inspect
from pathlib import Path
from typing import Any, Final

import msgspec

from . import model

COMMAND: Final = "python -m tandem_loadtest.figures.schema"
FILE: Final = Path(__file__).parents[3] / "docs" / "reference" / "bench-report.schema.json"


def schema() -> dict[str, Any]:
    """The schema (JSON Schema 2020-12), with the docstring of every field as its description."""
    generated = msgspec.json.schema(model.Report)
    generated["$defs"]["Report"]["properties"]["format"]["const"] = model.FORMAT
    texts = _descriptions()
    for name, definition in generated["$defs"].items():
        for field, value in definition["properties"].items():
            if text := texts.get((name, field)):
                # Beside `$ref`, too: since 2019-09 other keywords of a reference count.
                value["description"] = text
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": f"Written by `{COMMAND}`: change figures/model.py instead.",
        **generated,
    }


def content() -> bytes:
    """What the file must hold."""
    return msgspec.json.format(msgspec.json.encode(schema()), indent=2) + b"\n"


def _descriptions() -> dict[tuple[str, str], str]:
    """Class and field → the docstring below the field; Python itself does not keep these."""
    texts = {}
    for node in ast.parse(inspect.getsource(model)).body:
        if isinstance(node, ast.ClassDef):
            for field, text in zip(node.body, node.body[1:], strict=False):
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(field.target, ast.Name)
                    and isinstance(text, ast.Expr)
                    and isinstance(text.value, ast.Constant)
                    and isinstance(text.value.value, str)
                ):
                    texts[node.name, field.target.id] = inspect.cleandoc(text.value.value)
    return texts


if __name__ == "__main__":
    FILE.write_bytes(content())
