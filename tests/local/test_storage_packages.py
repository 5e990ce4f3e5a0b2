"""vLLM's storage connector for engines of `tandem up`: which packages, and from where."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem_contract.vllm_storage import MODULE_PATH
from tandem_local.storage_packages import PACKAGES, link_packages, main


def test_an_interpreter_without_site_packages_finds_the_connector(tmp_path: Path) -> None:
    link_packages(tmp_path, "")
    assert {entry.name for entry in tmp_path.iterdir()} == set(PACKAGES)
    find = f"import importlib.util as u; print(u.find_spec({MODULE_PATH!r}).origin)"
    # Without site-packages, nothing of this environment is importable but the links.
    found = subprocess.run(
        [sys.executable, "-S", "-c", find],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        check=True,
        text=True,
    )
    assert found.stdout.startswith(str(tmp_path))


def test_a_directory_of_pythonpath_with_the_connector_comes_first(tmp_path: Path) -> None:
    other, own, target = (tmp_path / name for name in ("other", "own", "target"))
    for directory in (other, own, target):
        directory.mkdir()
    for name in PACKAGES:
        (own / name).mkdir()
    link_packages(target, os.pathsep.join(map(str, (other, own))))
    assert {(target / name).resolve() for name in PACKAGES} == {own / name for name in PACKAGES}


def test_a_directory_that_lacks_a_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tandem_vllm_storage").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    target = tmp_path / "target"
    target.mkdir()
    assert main([str(target)]) == 1
    assert f"{tmp_path / 'tandem_contract'} does not exist" in capsys.readouterr().err
