"""Pages that code, messages and the README name exist; `make docs` checks links between pages."""

import re
import runpy
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = (
    *(
        "contract",
        "kube",
        "planner",
        "sidecar",
        "epp",
        "router",
        "operator",
        "engine",
        "kvstore",
        "http1",
    ),
    *("vllm_storage", "loadtest", "local", "doctor", "cli", "benchmarks", "images", "charts"),
    *("crds", "examples", "docs", "tests"),
)
SUFFIXES = {".py", ".md", ".yaml", ".toml", ".json", ".Dockerfile"}
PAGE = re.compile(r"\b(docs/[\w/.-]+\.(?:md|json))(?:#([\w-]+))?")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([\w-]+))?\)")
SOURCE = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w/.-]+)(?:::\w+)?`")
MODULE = re.compile(r"`(tandem_\w+)\.(\w+)[\w.]*`")
MOST_LINES_OF_THE_README = 150


def texts() -> dict[Path, str]:
    files = [file for file in ROOT.iterdir() if file.name == "Makefile" or file.suffix in SUFFIXES]
    for folder in FOLDERS:
        files += [
            file
            for file in (ROOT / folder).rglob("*")
            if file.suffix in SUFFIXES and file != Path(__file__)
        ]
    return {file: file.read_text(encoding="utf-8") for file in sorted(files) if file.is_file()}


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as mkdocs and forges make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return frozenset(re.sub(r"[\s-]+", "-", heading) for heading in plain)


def is_there(file: Path, anchor: str) -> bool:
    return file.exists() and (not anchor or anchor in anchors(file))


def test_every_page_that_is_named_exists() -> None:
    named = {
        (match[1], match[2] or "", str(file.relative_to(ROOT)))
        for file, text in texts().items()
        for match in PAGE.finditer(text)
    }
    assert [each for each in sorted(named) if not is_there(ROOT / each[0], each[1])] == []


def test_every_file_and_module_that_a_page_names_exists() -> None:
    packages = {folder.name: folder for folder in ROOT.glob("*/tandem_*")}
    missing = []
    for file in (ROOT / "docs").rglob("*.md"):
        text = file.read_text(encoding="utf-8")
        missing += [path for path in SOURCE.findall(text) if not (ROOT / path).exists()]
        for package, module in MODULE.findall(text):
            # The names of metrics begin like those of packages.
            folder = packages.get(package)
            if folder and not any((folder / name).exists() for name in (module, f"{module}.py")):
                missing.append(f"{package}.{module}")
    assert missing == []


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "charts/tandem/README.md"]
)
def test_links_outside_the_site_lead_somewhere(name: str) -> None:
    file = ROOT / name
    links = [(match[1], match[2] or "") for match in LINK.finditer(file.read_text("utf-8"))]
    assert links
    targets = [(file.parent / path if path else file, anchor) for path, anchor in links]
    assert [each for each in targets if not is_there(*each)] == []


def test_tables_that_come_from_the_code_are_current() -> None:
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    for page, text in generate["generated"]():
        assert page.read_text(encoding="utf-8") == text, f"{page.name} is stale: run make generate"
    with pytest.raises(ValueError, match="has no lines"):
        generate["_with_tables"]("no markers", {"flags": []})


def test_the_page_of_the_site_can_be_written() -> None:
    pages = runpy.run_path(str(ROOT / "docs" / "site_pages.py"))
    assert "llama-3.1-8b on H100 SXM 80 GB" in pages["plan_page"]()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) < MOST_LINES_OF_THE_README
