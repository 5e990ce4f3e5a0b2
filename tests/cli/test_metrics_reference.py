"""The reference page of metrics is current, and has what the pages for users name."""

import re

import pytest

from tandem_cli.metrics_reference import PAGE, page


@pytest.fixture(scope="module")
def generated() -> str:
    return page()


def test_the_page_is_current(generated: str) -> None:
    assert PAGE.read_text(encoding="utf-8") == generated, "run make generate"


@pytest.mark.parametrize(
    "row",
    [
        "| `tandem_epp_decisions_total` | `path`, `reason` |",
        "| `tandem_epp_outcomes_total` | `backend`, `outcome` |",
        "| `tandem_sidecar_legs_total` | `phase`, `result` |",
        "| `tandem_vllm_storage_loaded_tokens_total` |",
    ],
)
def test_rows_have_the_name_on_the_wire_and_the_labels(row: str, generated: str) -> None:
    """Names from constants, counters without their suffix, labels given by position and by name."""
    assert row in generated


def test_the_pages_for_users_name_metrics_that_exist(generated: str) -> None:
    known = set(re.findall(r"^\| `(\w+)`", generated, re.MULTILINE))
    pages = [*PAGE.parents[1].glob("operate/*.md"), *PAGE.parents[1].glob("understand/*.md")]
    named = {
        name
        for file in pages
        for name in re.findall(
            r"`((?:tandem_epp|tandem_sidecar)_\w+)(?:\{[^`]*)?`", file.read_text()
        )
    }
    assert named - known == set()
