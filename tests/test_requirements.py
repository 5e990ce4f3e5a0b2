"""docs/project/requirements.md: each requirement names code and tests that exist, or a reason."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/project/requirements.md"
REASON = re.compile(r"\*\*(?:Not yet|Differs|Advice)\*\*")
REFERENCE = re.compile(r"`([\w./-]+/[\w./-]+)(?:::(\w+))?`")


def requirements() -> list[list[str]]:
    """The rows of the page: number, requirement, code, and test or reason."""
    rows = [line.strip("|").split("|") for line in PAGE.read_text().splitlines()]
    cells = [[cell.strip() for cell in row] for row in rows]
    return [row for row in cells if re.fullmatch(r"[A-EGKPRSV]\d+", row[0])]


@cache
def functions(file: Path) -> frozenset[str]:
    """Names of all functions and methods that a Python file defines."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(n.name for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, kinds))


@pytest.mark.parametrize("row", requirements(), ids=lambda row: row[0])
def test_a_requirement_has_code_and_tests_that_exist_or_a_reason(row: list[str]) -> None:
    assert len(row) == 4, "a row has four cells"
    _, _, code, shown = row
    tests = REFERENCE.findall(shown)
    missing = [path for path, _ in (*REFERENCE.findall(code), *tests) if not (ROOT / path).exists()]
    missing += [
        f"{path}::{name}"
        for path, name in tests
        if name and path not in missing and name not in functions(ROOT / path)
    ]
    assert missing == []
    assert any(path.startswith("tests/") for path, _ in tests) or REASON.search(shown)


def test_requirements_are_numbered_without_gaps() -> None:
    for letter in "ABCDEGKPRSV":
        numbers = [row[0] for row in requirements() if row[0][0] == letter]
        assert numbers == [f"{letter}{i}" for i in range(1, len(numbers) + 1)]
        assert numbers
