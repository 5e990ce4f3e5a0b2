"""Limits that keep the code readable: vocabulary, references, file sizes and class names."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMPONENTS = (
    "contract", "kube", "planner", "sidecar", "epp", "router", "operator", "engine", "kvstore",
    "vllm_storage",
    "loadtest", "local", "doctor", "cli",
)  # fmt: skip
FOLDERS = (
    *COMPONENTS,
    "benchmarks",
    "images",
    "charts",
    "crds",
    "examples",
    "docs",
    "tests",
    ".ci",
)
TEXT_SUFFIXES = {".py", ".md", ".yaml", ".toml", ".json", ".sh", ".proto", ".Dockerfile"}

PERSONS = re.compile(r"\b(nobody|whoever|whom)\b", re.IGNORECASE)
"""Words that usually hide the actor of a sentence."""
MOST_PERSONS = 10
OUTSIDE_DOCUMENTS = re.compile(
    r"\bseed 00|\b(?:PROTOCOLS|DESIGN|RECIPES)\b|\b(?:STYLE|PERFORMANCE)\.md\b"
)
"""Names of documents that are not in the repository."""
MOST_LINES = 500
"""An outlier. About 300 is the habit."""


def sources(*folders: str) -> Iterator[Path]:
    """Python files below `folders`, without generated ones and this file."""
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            if not file.name.endswith("_pb2.py") and file != Path(__file__):
                yield file


def relative(file: Path) -> str:
    return str(file.relative_to(ROOT))


def test_sentences_name_their_actor() -> None:
    uses = [
        f"{relative(file)}: {match[0]}"
        for file in sources(*FOLDERS)
        for match in PERSONS.finditer(file.read_text())
    ]
    count = len(uses)
    assert count <= MOST_PERSONS, "name the actor instead:\n" + "\n".join(uses)


def test_no_text_refers_to_a_document_outside_the_repository() -> None:
    files = [file for file in ROOT.iterdir() if file.is_file()]
    files += [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.is_file()]
    references = [
        f"{relative(file)}: {match[0]}"
        for file in files
        if (file.suffix in TEXT_SUFFIXES or file.name in ("Makefile", "run"))
        and file != Path(__file__)
        for match in OUTSIDE_DOCUMENTS.finditer(file.read_text())
    ]
    assert references == []


def test_no_source_file_is_too_long() -> None:
    lengths = {
        relative(file): len(file.read_text().splitlines())
        for file in sources(*COMPONENTS, "benchmarks", "images", "charts")
    }
    assert {file: lines for file, lines in lengths.items() if lines > MOST_LINES} == {}


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_class_name_is_used_once_in_a_package(component: str) -> None:
    """Protocols are exempt: each consumer declares its own."""
    places = defaultdict(list)
    for file in sources(component):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not _is_protocol(node):
                places[node.name].append(relative(file))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(
        ast.unparse(base).partition("[")[0] in ("Protocol", "typing.Protocol")
        for base in node.bases
    )
