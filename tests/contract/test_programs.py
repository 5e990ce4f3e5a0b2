"""Each program is the first process of its container, of which the kernel drops signals that have
no handler: here in a PID namespace."""

import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem_contract.programs import TERMINATED

pytestmark = pytest.mark.component

_SCRIPTS: dict[str, str] = tomllib.loads(
    (Path(__file__).parents[2] / "pyproject.toml").read_text()
)["project"]["scripts"]
_UNSHARE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
# Not `signal.pause()`: a signal just before that call is noted, but its handler in Python waits.
_WAITS = "import time\nprint('waiting', flush=True)\nwhile True: time.sleep(0.01)\n"
_DEADLINE = 60.0


@contextmanager
def _first_process(*arguments: str, folder: Path) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """Python as the first process of a namespace, with modules of `folder`, once it prints a line;
    and its process id here."""
    if subprocess.run([*_UNSHARE, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine lets no user make a PID namespace")
    with subprocess.Popen(
        [*_UNSHARE, sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            yield process, int(children)
        finally:
            process.kill()


@pytest.mark.parametrize("name", _SCRIPTS)
def test_sigterm_ends_a_program_that_still_imports(name: str, tmp_path: Path) -> None:
    # The first library that every program imports.
    (tmp_path / "click.py").write_text(_WAITS)
    module, _, function = _SCRIPTS[name].partition(":")
    start = f"from {module} import {function}; {function}()"
    with _first_process("-c", start, folder=tmp_path) as (process, child):
        os.kill(child, signal.SIGTERM)
        status = process.wait(_DEADLINE)
    assert status == (TERMINATED if name == "tandem" else 0)


@pytest.mark.parametrize(
    ("module", "library", "status"),
    [("pods.model_download", "huggingface_hub", TERMINATED), ("routing.api_keys", "click", 0)],
)
def test_sigterm_ends_a_module_that_still_imports(
    module: str, library: str, status: int, tmp_path: Path
) -> None:
    (tmp_path / f"{library}.py").write_text(_WAITS)
    with _first_process("-m", f"tandem_operator.{module}", folder=tmp_path) as (process, child):
        os.kill(child, signal.SIGTERM)
        assert process.wait(_DEADLINE) == status


_LOADS = """
import sys
from tandem_contract import programs
from tandem_engine.engine import Engine

async def load(_engine):
    print("waiting", flush=True)
    await __import__("asyncio").Event().wait()

Engine.start = load
sys.argv[1:] = ["--model=tiny", "--port=0"]
programs.engine()
"""


def test_sigterm_ends_an_engine_that_loads_its_model(tmp_path: Path) -> None:
    with _first_process("-c", _LOADS, folder=tmp_path) as (process, child):
        os.kill(child, signal.SIGTERM)
        assert process.wait(_DEADLINE) == 0
