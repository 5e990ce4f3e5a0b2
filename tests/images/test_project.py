"""The layer with the project's code is reproducible, and its commands start."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from images.build import ENTRYPOINTS, image
from images.contents import SITE, project_files
from images.oci import Text, write_layer

ROOT = Path(__file__).parents[2]
COMMANDS = (
    *("tandem", "tandem-engine", "tandem-epp", "tandem-operator", "tandem-router"),
    "tandem-sidecar",
)
LOCKS = ("runtime", "engine", "build")


@pytest.mark.component
def test_two_builds_of_the_layer_are_identical(tmp_path: Path) -> None:
    layers = []
    for name in ("first", "second"):
        stage = tmp_path / name
        stage.mkdir()
        layers.append(write_layer(project_files(stage, ROOT), tmp_path / f"{name}.tar"))
    assert layers[0].digest == layers[1].digest


@pytest.mark.component
def test_the_layer_contains_compiled_modules(tmp_path: Path) -> None:
    compiled = tmp_path / "compiled"
    (compiled / "tandem_epp/placement").mkdir(parents=True)
    (compiled / "tandem_epp/placement/picker.so").touch()
    files = project_files(tmp_path / "stage", ROOT, compiled)
    assert f"{SITE}/tandem_epp/placement/picker.so" in files
    assert f"{SITE}/tandem_epp/placement/picker.py" in files


@pytest.mark.component
def test_every_command_starts_from_the_layer(tmp_path: Path) -> None:
    files = project_files(tmp_path, ROOT)
    commands = {path.rpartition("/")[2]: text for path, text in files.items() if "/bin/" in path}
    assert sorted(commands) == sorted(COMMANDS)
    for name in ENTRYPOINTS:
        assert image(name, "1", [], command=name).entrypoint[0] in files
    assert f"{SITE}/tandem_operator/crds/decodepools.yaml" in files
    for name, text in commands.items():
        assert isinstance(text, Text)
        assert text.mode == 0o755
        script = tmp_path / name
        script.write_bytes(text.content)
        ran = subprocess.run(
            [sys.executable, script, "--version"], capture_output=True, text=True, check=False
        )
        assert (ran.returncode, ran.stderr) == (0, ""), name


@pytest.mark.parametrize("name", LOCKS)
def test_images_pin_the_versions_that_the_tests_use(name: str) -> None:
    assert _pins(name) <= _pins("dev")


def test_the_engine_lock_contains_the_runtime_lock() -> None:
    assert _pins("runtime") <= _pins("engine")


def _pins(lock: str) -> set[tuple[str, str]]:
    text = (ROOT / f"requirements/{lock}.lock").read_text()
    return set(re.findall(r"^([\w.-]+)==([^ \\]+)", text, re.MULTILINE))
