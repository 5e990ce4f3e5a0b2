"""The run directory of a stack: how another terminal finds it.

    RUN_DIR/
      lock           held by the process that runs the stack
      state.json     State: endpoint, pods, addresses
      pods/POD/      CONTAINER.log, volumes/
      plan-keys/     the key that the EPP signs plans with

Errors: `Refused` when a run directory is taken or cannot be used, `NoStack` when none runs there.
"""

import fcntl
import os
from pathlib import Path
from typing import Final, Self

import msgspec

from tandem_contract.paths import Role

from .errors import NoStack, Refused

_STATE: Final = "state.json"
_LOCK: Final = "lock"


class PodState(msgspec.Struct, frozen=True):
    """One pod as its stack last saw it."""

    name: str
    role: Role | None
    """None: a component of the router."""
    model: str
    address: str
    ready: bool
    restarts: int
    pids: dict[str, int]
    """Container → process group; the process itself is the group's second process."""
    engine_metrics: str | None = None
    """URL of the engine's metrics; None when the pod runs none."""
    sidecar_metrics: str | None = None
    """URL of the sidecar's; None when the pod runs none."""


class State(msgspec.Struct, frozen=True):
    """A stack as it last was."""

    pid: int
    endpoint: str
    """URL that clients use."""
    pods: tuple[PodState, ...] = ()


def default_run_dir() -> Path:
    """Where a stack keeps its state unless told otherwise; per user."""
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "tandem"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / "run"


class RunDir:
    """A run directory held by this process: no other stack can take it. A context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock = -1

    def __enter__(self) -> Self:
        """Raises Refused when another stack runs there, or it cannot be written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as err:
            raise Refused(
                f"{self.path}: cannot keep the run's files there: {err.strerror}"
            ) from err
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise Refused(
                f"a stack already runs in {self.path}: stop it, or choose another with --run-dir"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        (self.path / _STATE).unlink(missing_ok=True)
        os.close(self._lock)

    def write(self, state: State) -> None:
        """Publish `state`; a reader sees the old one or the new one, whole."""
        fresh = self.path / f"{_STATE}.new"
        fresh.write_bytes(msgspec.json.encode(state))
        fresh.replace(self.path / _STATE)


def read_state(run_dir: Path) -> State:
    """The state of the stack that runs in `run_dir`.

    Raises NoStack, saying whether none was started there or one ended without tidying up.
    """
    try:
        state = msgspec.json.decode((run_dir / _STATE).read_bytes(), type=State)
        lock = os.open(run_dir / _LOCK, os.O_RDWR)
    except (OSError, msgspec.MsgspecError):
        raise NoStack(
            f"no stack runs in {run_dir}: start one with tandem up or tandem demo, "
            "or name its directory with --run-dir"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return state
    finally:
        os.close(lock)
    raise NoStack(
        f"the stack of {run_dir} is gone (process {state.pid} was killed, and its pods with it): "
        f"its logs are in {run_dir / 'pods'}"
    )
