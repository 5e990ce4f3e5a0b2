"""The reference pages: their content, and that the checkout's match its CRDs."""

import re
from pathlib import Path

import pytest

from tandem_operator.crd import KINDS
from tandem_operator.reference import COMMAND, PAGES, page, write

from .test_crd import nodes, root


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_matches_the_crd(kind: str) -> None:
    file = PAGES / f"{kind.lower()}.md"
    assert file.read_text(encoding="utf-8") == page(kind), f"stale: run .venv/bin/{COMMAND}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_has_a_row(kind: str) -> None:
    parts = [root(kind)["properties"][part] for part in ("spec", "status")]
    names = [path.rpartition(".")[2] for part in parts for path, _ in nodes(part)]
    rows = re.findall(r"^\| `([^`]+)` \|", page(kind), re.MULTILINE)
    assert sorted(rows) == sorted(name for name in names if name and not name.endswith("[]"))


@pytest.mark.parametrize(
    "row",
    [
        "| `name` | string | **required** | Name of the PrefillPool. |",
        "| `role` | `decode` \\| `unified` | `decode` | decode pods take",
        "prefillTimeout. 0 to 10. |",
        "| `loraAdapters` | list of object |",
        "| `nodeSelector` | map of string |",
        "at most 1. Above 0, at most 1. |",
        "### `spec.model.loraAdapters[]`",
        "- `gatewayRef`: gatewayRef needs inferencePool.enabled: true",
        "- `extraArgs`: model, served-model-name, host",
        "| TP | `.status.tensorParallel` | Tensor parallel size. With `-o wide`. |",
    ],
)
def test_rows(row: str) -> None:
    assert row in page("DecodePool")


def test_one_page_is_written_for_each_kind(tmp_path: Path) -> None:
    files = write(tmp_path / "new")
    assert [file.name for file in files] == ["prefillpool.md", "decodepool.md"]
    assert all(file.read_text(encoding="utf-8").startswith("<!-- Written by") for file in files)
