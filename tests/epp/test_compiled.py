"""The modules of the request path, and whether they are compiled."""

import os
import subprocess
import sys
import sysconfig
from importlib import import_module
from pathlib import Path

import pytest
from images.hot_path import MODULES, CannotCompile, check_import, compile_modules

from tandem_epp.process.compiled import is_compiled

from ..cluster.fixtures import LEFT_OUT

HEADERS = Path(sysconfig.get_path("include"), "Python.h")
IS_COMPILED = "build/compiled" in os.environ.get("PYTHONPATH", "")


def test_all_modules_of_the_request_path_are_compiled_or_none() -> None:
    compiled = [name for name in MODULES if is_compiled(import_module(name))]
    assert compiled == (list(MODULES) if IS_COMPILED else [])


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CannotCompile, match="install gcc"):
        compile_modules(tmp_path)


def test_a_compiled_epp_that_cannot_be_imported_gets_into_no_image(tmp_path: Path) -> None:
    package = tmp_path / "tandem_epp"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "main.py").write_text("raise TypeError('interpreted classes cannot inherit')\n")
    with pytest.raises(CannotCompile, match="imported: TypeError: interpreted classes"):
        check_import(tmp_path)


@pytest.mark.component
@pytest.mark.usefixtures("gcc_program")
@pytest.mark.skipif(not HEADERS.exists(), reason=f"{LEFT_OUT}NO HEADERS OF PYTHON: {HEADERS}")
def test_a_compiled_module_raises_with_file_and_line(tmp_path: Path) -> None:
    package = tmp_path / "tandem_contract"
    package.mkdir()
    (package / "__init__.py").touch()
    failing = "def divide(a: int, b: int) -> int:\n    return a // b\n"
    (package / "failing.py").write_text(failing)
    script = (
        "import pathlib, images.hot_path as hot; hot.MODULES = ('tandem_contract.failing',)\n"
        "hot.compile_modules(pathlib.Path('.'))"
    )
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True)
    call = "from tandem_contract import failing; print(failing.__file__); failing.divide(1, 0)"
    ran = subprocess.run(
        [sys.executable, "-c", call], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.stdout.strip().endswith(".so")
    assert 'tandem_contract/failing.py", line 2, in divide' in ran.stderr
