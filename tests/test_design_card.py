"""The packages of the design card: each is a dependency, and the code that it is for imports it."""

import ast
import re
import tomllib
from pathlib import Path
from typing import Final

import pytest

ROOT = Path(__file__).parent.parent
USES: Final = (
    ("kopf", "kopf", "operator"),
    ("kubernetes", "kubernetes", "kube"),
    ("aiohttp", "aiohttp", "sidecar"),
    ("grpcio", "grpc", "epp"),
    ("protobuf", "google.protobuf", "epp"),
    ("torch", "torch", "engine"),
    ("nvidia-ml-py", "pynvml", "doctor"),
    ("prometheus-client", "prometheus_client", "sidecar"),
    ("prometheus-client", "prometheus_client", "epp"),
    ("prometheus-client", "prometheus_client", "engine"),
    ("pytest", "pytest", "tests"),
)
"""Distribution, module, and the folder whose code imports it."""


def dependencies() -> set[str]:
    """The names of everything that pyproject.toml requires, its extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    listed = [*project["dependencies"], *(line for extra in extras for line in extra)]
    return {re.split(r"[><=\[ ]", line, maxsplit=1)[0] for line in listed}


def imported(file: Path) -> set[str]:
    """The modules that a file imports, with their parent packages."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    parts = [name.split(".") for name in names]
    return {".".join(part[:length]) for part in parts for length in range(1, len(part) + 1)}


@pytest.mark.parametrize(("distribution", "module", "folder"), USES)
def test_a_package_of_the_design_card_is_required_and_used(
    distribution: str, module: str, folder: str
) -> None:
    assert distribution in dependencies()
    assert any(module in imported(file) for file in (ROOT / folder).rglob("*.py"))
