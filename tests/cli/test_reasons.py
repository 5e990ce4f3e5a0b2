"""The reasons that the command explains are those that the EPP gives and the page lists."""

import re
from pathlib import Path

from tandem_cli.timeline import REASONS

ROOT = Path(__file__).parents[2]


def test_each_reason_is_given_by_the_epp() -> None:
    sources = "".join(file.read_text() for file in (ROOT / "epp/tandem_epp").rglob("*.py"))
    assert [reason for reason in REASONS if f'"{reason}"' not in sources] == []


def test_the_page_lists_the_same_reasons() -> None:
    page = (ROOT / "docs/operate/troubleshooting.md").read_text()
    table = page.partition("### Reasons")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(REASONS)
