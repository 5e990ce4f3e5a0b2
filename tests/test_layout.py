"""Names and files that must not shadow or overwrite each other."""

import operator
import re
from collections import defaultdict
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMPONENTS = (
    "contract", "http1", "kube", "planner", "sidecar", "epp", "router", "operator", "engine",
    "kvstore", "vllm_storage", "loadtest", "local", "doctor", "cli",
)  # fmt: skip


def test_operator_is_the_standard_librarys(request: pytest.FixtureRequest) -> None:
    assert request.session.testscollected > 1, (
        "run the whole suite: collecting it is what could import operator/"
    )
    assert operator.itemgetter(1)("ab") == "b"
    assert ROOT not in Path(operator.__file__).parents


@pytest.mark.parametrize("component", COMPONENTS)
def test_component_folder_holds_no_package_and_nothing_collectable(component: str) -> None:
    folder = ROOT / component
    assert not (folder / "__init__.py").exists()
    assert not list(folder.rglob("conftest.py"))
    assert not list(folder.rglob("test_*.py"))
    assert [p.name for p in folder.iterdir() if (p / "__init__.py").exists()] == [
        f"tandem_{component}"
    ]


def test_every_tests_folder_is_a_package() -> None:
    folders = {file.parent for file in (ROOT / "tests").rglob("test_*.py")}
    assert ROOT / "tests" / "epp" in folders
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_make_e2e_names_all_folders_with_tests_on_the_node() -> None:
    """Collecting the others takes half a minute."""
    mark = re.compile(r"^(pytestmark = \[|@|    )pytest\.mark\.node\b", re.MULTILINE)
    marked = {
        path.relative_to(ROOT).parts[:2]
        for path in (ROOT / "tests").rglob("test_*.py")
        if mark.search(path.read_text())
    }
    folders = " ".join(sorted("/".join(parts) for parts in marked))
    assert f"-m node {folders} " in (ROOT / "Makefile").read_text()


def test_no_two_libraries_bring_the_same_file() -> None:
    """Otherwise the library installed last overwrites the file, and the other may break."""
    owners = defaultdict(set)
    for library in distributions():
        name = library.name  # each access parses the library's METADATA again
        for line in (library.read_text("RECORD") or "").splitlines():
            owners[line.rsplit(",", 2)[0]].add(name)
    assert not {file: names for file, names in owners.items() if len(names) > 1}
