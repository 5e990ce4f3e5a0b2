from pathlib import Path

import pytest

from tandem_contract.paths import Role
from tandem_local.errors import NoStack, SetupError
from tandem_local.state import PodState, RunDir, State, default_run_dir, read_state

STATE = State(
    7, "http://127.0.0.1:8080", (PodState("a", Role.DECODE, "m", "127.1.1.1", True, 0, {"c": 9}),)
)


def test_a_running_stack_can_be_read(tmp_path: Path) -> None:
    with RunDir(tmp_path / "run") as run_dir:
        run_dir.write(STATE)
        assert read_state(tmp_path / "run") == STATE


def test_a_stopped_stack_has_no_state(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run_dir:
        run_dir.write(STATE)
    with pytest.raises(NoStack, match="no stack runs in"):
        read_state(tmp_path)


def test_a_killed_stack_is_reported_as_killed(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run_dir:
        run_dir.write(STATE)
        state = (tmp_path / "state.json").read_bytes()
    (tmp_path / "state.json").write_bytes(state)
    with pytest.raises(NoStack, match=r"no longer runs \(process 7 was killed"):
        read_state(tmp_path)


def test_a_run_directory_can_be_used_by_one_stack_at_a_time(tmp_path: Path) -> None:
    with (
        RunDir(tmp_path),
        pytest.raises(SetupError, match="a stack already runs in"),
        RunDir(tmp_path),
    ):
        pass
    with RunDir(tmp_path):
        pass


def test_a_run_directory_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(SetupError, match="cannot create the run directory"),
        RunDir(tmp_path / "file"),
    ):
        pass


def test_the_default_run_directory_belongs_to_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    assert default_run_dir() == Path("/run/user/1/tandem")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert default_run_dir() == Path("/c/tandem/run")
