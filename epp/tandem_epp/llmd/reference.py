"""Writes the table of llm-d's flags in docs/reference/llm-d.md from `flags`.

    python -m tandem_epp.llmd.reference     part of `make generate`

The table stands between two marker lines. A test compares it with `flag_table()`.
"""

from pathlib import Path
from typing import Final

from .flags import FLAGS, SHORTHANDS, LlmdFlag

PAGE: Final = Path(__file__).parents[3] / "docs" / "reference" / "llm-d.md"
BEGIN: Final = "<!-- flags: written by make generate -->"
END: Final = "<!-- end of flags -->"


def flag_table() -> str:
    """The table in Markdown: every flag, how it is treated, and what it does or why not."""
    rows = [f"| {_name(flag)} | {flag.treatment.value} | {flag.text} |" for flag in FLAGS]
    return "\n".join(["| flag | here | what it does, or why not |", "|---|---|---|", *rows, ""])


def with_table(page: str) -> str:
    """`page` with the current table. Raises ValueError without the two marker lines."""
    before, begin, rest = page.partition(BEGIN + "\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name}: the marker lines {BEGIN!r} and {END!r} are missing")
    return f"{before}{BEGIN}\n{flag_table()}{END}{after}"


def _name(flag: LlmdFlag) -> str:
    dashes = "`-" if flag.name in SHORTHANDS else "`--"
    return f"{dashes}{flag.name}`" + (f" ({flag.default})" if flag.default else "")


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)  # noqa: T201 - a command


if __name__ == "__main__":
    main()
