"""Starts the programs under test in milliseconds: as forks of a process that has imported them.

`install` lets `subprocess` and asyncio start `python -m tandem_epp …` and the other `PROGRAMS` in
this way; the test holds a child process as always. What differs from a new process: the modules are
imported already, the command line that the system shows is that of the first process, and torch
uses one thread. A new process it is while the first one still imports, and under another program
(`prlimit`, `taskset`), by the script in `bin` or with options of Python.

    python -P preloaded.py FD MODULE …   the first process; FD is its socket
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

_WITHOUT_TORCH: Final = (
    *("tandem_epp.main", "tandem_operator.main", "tandem_router.main", "tandem_router.run"),
    *("tandem_sidecar.main", "tandem_sidecar.process.run"),
)
PROGRAMS: Final = {
    "benchmarks.counting": ("benchmarks.counting",),
    "tandem_engine.main": ("tandem_engine.main", "tandem_engine.process"),
    "tandem_epp": _WITHOUT_TORCH,
    "tandem_operator.main": _WITHOUT_TORCH,
    "tandem_router.main": _WITHOUT_TORCH,
    "tandem_sidecar.main": _WITHOUT_TORCH,
}
"""What `python -m` names, and the modules of its first process, which programs with most of their
imports in common share."""
_READ_AT_IMPORT: Final = ("PYTHON", "HF_", "LC_", "LD_", "LANG")
"""Beginnings of names of variables that an import or Python's start reads."""
_UNBUFFERED: Final = "PYTHONUNBUFFERED"
_SUBREAPER: Final = 36
"""prctl's PR_SET_CHILD_SUBREAPER."""
_LARGEST: Final = 1 << 18
"""Bytes of a message."""


class _First:
    """The process that has imported programs, and starts them."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(other.fileno()), *modules],
                env={**environment, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=(other.fileno(),),
            )
        self._is_ready = False
        atexit.register(self._end)

    def start(self, request: dict[str, Any], files: Sequence[int]) -> int:
        """The id of a new child of this process; 0 while the first process imports, for which an
        event loop must not wait, and if it has failed."""
        if not self._is_ready:
            try:
                self._is_ready = bool(self._socket.recv(64, socket.MSG_DONTWAIT))
            except BlockingIOError:
                return 0
        with _adopting():
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], files)
                return int(self._socket.recv(64) or 0)
            except OSError:
                return 0

    def _end(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()


@contextmanager
def _adopting() -> Iterator[None]:
    """The system gives a process whose parent ends meanwhile to this process."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SUBREAPER, 0, 0, 0, 0)


def install() -> None:
    """Start the programs in this way from now on, in this process."""
    if sys.platform != "linux":
        return
    environment, executes = dict(os.environ), subprocess.Popen._execute_child  # type: ignore[attr-defined]
    firsts: dict[Sequence[str], _First] = {}
    lock = threading.RLock()  # The first process is started by `subprocess`, too.

    def execute(self: Any, args: Any, *rest: Any) -> None:
        names = executes.__code__.co_varnames[2 : executes.__code__.co_argcount]
        with lock:
            given = dict(zip(names, rest, strict=True))
            if (module := _program(args, given, environment)) is not None:
                modules = PROGRAMS[module]
                if modules not in firsts:
                    firsts[modules] = _First(modules, environment)
                self.pid = firsts[modules].start(*_request(module, args, given))
        if module is None or not self.pid:
            executes(self, args, *rest)
            return
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]


def _program(args: Any, given: dict[str, Any], known: Mapping[str, str]) -> str | None:
    """The name of the program, if a fork is like its start; else None."""
    if not isinstance(args, list | tuple) or list(args[:2]) != [sys.executable, "-m"]:
        return None
    environment = os.environ if given["env"] is None else given["env"]
    differing = {
        name
        for name in {*environment, *known}
        if environment.get(name) != known.get(name) and name.startswith(_READ_AT_IMPORT)
    }
    special = given["preexec_fn"] or given["pass_fds"] or given["shell"] or given["executable"]
    owner = (given["gid"], given["gids"], given["uid"], given["umask"])
    if (
        args[2] not in PROGRAMS
        or differing - {_UNBUFFERED}
        or special
        or any(value not in (None, -1) for value in owner)
    ):
        return None
    return str(args[2])


def _request(
    module: str, args: Sequence[str], given: dict[str, Any]
) -> tuple[dict[str, Any], list[int]]:
    """What the new process needs, and its three first files."""
    request = {
        "module": module,
        "arguments": [os.fspath(argument) for argument in args[3:]],
        "environment": dict(os.environ if given["env"] is None else given["env"]),
        "directory": os.getcwd() if given["cwd"] is None else os.fspath(given["cwd"]),
        "parent": os.getpid(),
        "session": given["start_new_session"],
        "group": given["process_group"],
    }
    files = [
        number if given[name] == -1 else given[name]
        for number, name in enumerate(("p2cread", "c2pwrite", "errwrite"))
    ]
    return request, files


def serve(requests: socket.socket, modules: Sequence[str]) -> None:
    """Start a process for each request; returns in each of them."""
    # For programs that are not installed; behind all others, as `tests` is not the folder of a new
    # process.
    sys.path.append(os.getcwd())
    for module in modules:
        importlib.import_module(module)
    generators = [each for each in gc.get_objects() if type(each) is random.Random]
    # A collection would write to the pages that all processes share.
    gc.collect()
    gc.freeze()
    requests.send(b"ready")
    while True:
        try:
            data, files, _, _ = socket.recv_fds(requests, _LARGEST, 3)
        except ConnectionResetError:
            # Those who asked have ended without reading the last answer.
            return
        if not data:
            return
        read_end, write_end = os.pipe()
        if not (between := os.fork()):
            # The process belongs to the test once its parent, this one, has ended.
            if process := os.fork():
                os.write(write_end, str(process).encode())
                os._exit(0)
            requests.close()
            os.close(read_end)
            os.close(write_end)
            for generator in generators:
                generator.seed()
            code: Any = None
            try:
                _become(json.loads(data), files)
            except SystemExit as end:
                code = end.code
            _end(code)
        os.close(write_end)
        for file in files:
            os.close(file)
        os.waitpid(between, 0)
        requests.send(os.read(read_end, 64))
        os.close(read_end)


def _become(request: dict[str, Any], files: Sequence[int]) -> None:
    """Run the program in this process."""
    while os.getppid() != request["parent"]:
        time.sleep(0.0005)
    if request["session"]:
        os.setsid()
    if request["group"] is not None and request["group"] >= 0:
        os.setpgid(0, request["group"])
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    # Programs' modules read these when they are imported, or keep them.
    tempfile.tempdir = None
    if _UNBUFFERED in request["environment"]:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.path.insert(0, os.getcwd())
    sys.argv[1:] = request["arguments"]
    sys.modules.pop(request["module"], None)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _end(code: str | int | None) -> None:
    """End this process, without taking apart the modules that it shares with the first process.

    To take them apart costs half a second, since the system copies each page that it touches. What
    the program has left behind is told as at any end: by its threads, its exit functions and the
    collector.
    """
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
