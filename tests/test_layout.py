"""The folder `operator/` must not shadow the standard library's `operator`."""

import operator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMPONENTS = (
    "contract", "planner", "sidecar", "epp", "operator", "engine", "loadtest", "local", "cli",
)  # fmt: skip


def test_operator_is_the_standard_librarys(request: pytest.FixtureRequest) -> None:
    assert request.session.testscollected > 1, "run with the whole suite: collection is the trap"
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


@pytest.mark.parametrize("folder", [p.parent for p in (ROOT / "tests").rglob("test_*.py")])
def test_every_tests_folder_is_a_package(folder: Path) -> None:
    assert (folder / "__init__.py").exists()
