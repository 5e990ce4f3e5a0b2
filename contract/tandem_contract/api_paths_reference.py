"""The table of the API's paths in docs/reference/api-paths.md, written from `api_paths`.

python -m tandem_contract.api_paths_reference     rewrites the table
"""

from pathlib import Path
from typing import Final

from .api_paths import API

BEGIN: Final = "<!-- API paths, written by `make generate` from tandem_contract/api_paths.py -->"
END: Final = "<!-- end of API paths -->"


def table() -> str:
    """The table in Markdown."""
    rows = "\n".join(f"| `{path}` | {purpose} |" for path, purpose in API.items())
    return f"| path | purpose |\n|---|---|\n{rows}"


def replaced(page: str) -> str:
    """`page` with the current table. Raises ValueError when it has no place for one."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page has no lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    file = Path(__file__).parents[2] / "docs" / "reference" / "api-paths.md"
    file.write_text(replaced(file.read_text()))
