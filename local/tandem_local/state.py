"""The run directory of a stack: how commands in another terminal find the stack.

    RUN_DIR/
      lock           locked (flock) by the process that runs the stack, for as long as it runs
      state.json     State: endpoint, pods, addresses
      pods/POD/      CONTAINER.log, volumes/
      plan-keys/     the key with which the EPP signs plans

Errors: `SetupError` if the run directory is in use or not writable, `NoStack` if no stack runs
there.
"""

import fcntl
import os
from pathlib import Path
from typing import Final, Self

import msgspec

from tandem_contract.paths import Role

from .errors import NoStack, SetupError

_STATE: Final = "state.json"
_LOCK: Final = "lock"


class PodState(msgspec.Struct, frozen=True):
    """One pod, as its stack last published it."""

    name: str
    role: Role | None
    """None for a component of the router."""
    model: str
    address: str
    ready: bool
    restarts: int
    pids: dict[str, int]
    """Container → process group; the container's command is the group's second process."""
    engine_metrics: str | None = None
    """URL of the engine's metrics; None when the pod runs no engine."""
    sidecar_metrics: str | None = None
    """URL of the sidecar's metrics; None when the pod runs no sidecar."""


class State(msgspec.Struct, frozen=True):
    """A stack, as it was last published."""

    pid: int
    endpoint: str
    """URL that clients use."""
    pods: tuple[PodState, ...] = ()


def default_run_dir() -> Path:
    """The default run directory, one for each user."""
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "tandem"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / "run"


class RunDir:
    """A run directory locked by this process, so that no other stack uses it. A context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock = -1

    def __enter__(self) -> Self:
        """Raises SetupError if another stack runs there, or the directory cannot be written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as err:
            raise SetupError(
                f"{self.path}: cannot create the run directory: {err.strerror}"
            ) from err
        try:
            # Not blocking: a second stack should fail at once and not start when the first one
            # ends.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise SetupError(
                f"a stack already runs in {self.path}: stop it, or choose another with --run-dir"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        # The state first, then the lock: a reader that finds the state without the lock reports
        # that the stack was killed. The lock file stays, because after its deletion two processes
        # could each lock a file of this name.
        (self.path / _STATE).unlink(missing_ok=True)
        os.close(self._lock)

    def write(self, state: State) -> None:
        """Publish `state` atomically: a reader sees the old state or the new one."""
        temporary = self.path / f"{_STATE}.new"
        temporary.write_bytes(msgspec.json.encode(state))
        temporary.replace(self.path / _STATE)


def read_state(run_dir: Path) -> State:
    """The state of the stack that runs in `run_dir`.

    Raises NoStack; the message tells a stack that was never started from one that was killed.
    """
    try:
        state = msgspec.json.decode((run_dir / _STATE).read_bytes(), type=State)
        lock = os.open(run_dir / _LOCK, os.O_RDWR)
    except (OSError, msgspec.MsgspecError):
        raise NoStack(
            f"no stack runs in {run_dir}: start one with tandem up or tandem demo, "
            "or name its directory with --run-dir"
        ) from None
    # The kernel drops the lock when the stack's process ends, however it ends: a lock that can be
    # taken means that state.json is a leftover.
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return state
    finally:
        os.close(lock)
    raise NoStack(
        f"the stack of {run_dir} no longer runs (process {state.pid} was killed, and its pods with "
        f"it): its logs are in {run_dir / 'pods'}"
    )
