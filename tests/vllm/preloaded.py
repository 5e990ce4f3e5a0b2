"""Starts vLLM engines in seconds: a process imports vLLM once, and each engine is a fork of it.

    python -P preloaded.py FD MODULE …                the process; FD is its listening socket
    python -I -S preloaded.py SOCKET MODULE [ARG …]   run MODULE in a fork, as `python -m` would

An engine has three processes. On a CPU each of them imports for eight seconds, when the one before
has done so; all else takes two seconds. The fork has the environment, the working directory, the
CPUs, the process group and the output of the second command, which ends with it.

NIXL's progress thread sleeps while there is nothing to do. `nixl_agent` sets no pause, so that the
thread of each engine would occupy a core, of two on a small machine.

It does not suit a test that sets variables which are read at an import, such as PYTHONHASHSEED or
HF_HUB_CACHE, to other values than the first process has.
"""

import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import Any


def serve(listener: socket.socket, modules: list[str]) -> None:
    """Fork an engine for each connection."""
    # The kernel reaps engines that end.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for module in modules:
        importlib.import_module(module)
    _let_nixl_pause()
    # A collection would write to the pages that all engines share.
    gc.collect()
    gc.freeze()
    while True:
        connection, _ = listener.accept()
        with connection:
            request, outputs = _receive(connection)
            sys.stdout.flush()
            sys.stderr.flush()
            if not (engine := os.fork()):
                connection.close()
                listener.close()
                os._exit(_become(request, outputs))
            for output in outputs:
                os.close(output)
            try:
                os.setpgid(engine, request["group"])
            except OSError:
                # The test has killed the group meanwhile.
                os.kill(engine, signal.SIGKILL)
            with suppress(OSError):
                connection.sendall(str(engine).encode())


def _let_nixl_pause() -> None:
    """Have NIXL's progress thread wait for data up to a millisecond; data wake it at once."""
    bindings = importlib.import_module("nixl._bindings")
    create = bindings.nixlAgent

    def nixl_agent(name: str, config: Any) -> Any:
        config.pthrDelay = 1000  # In microseconds.
        return create(name, config)

    bindings.nixlAgent = nixl_agent


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The request of `run`, and where the engine's output goes."""
    data, outputs, _, _ = socket.recv_fds(connection, 1, 2)
    while piece := connection.recv(65536):
        data += piece
    return json.loads(data), outputs


def _become(request: dict[str, Any], outputs: list[int]) -> int:
    """Run the engine in this fork. Returns its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
        os.close(output)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    os.sched_setaffinity(0, request["cpus"])
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    module, *sys.argv[1:] = request["command"]
    # On a CPU vLLM always chooses `spawn`, whose processes import everything again.
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda _method=None: fork  # type: ignore[assignment]
    sys.modules.pop(module, None)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def run(path: str, command: list[str]) -> None:
    """Have the process at `path` fork an engine, and wait until it has ended."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        request = json.dumps(
            {
                "command": command,
                "environment": dict(os.environ),
                "directory": os.getcwd(),
                "cpus": list(os.sched_getaffinity(0)),
                "group": os.getpgrp(),
            }
        ).encode()
        socket.send_fds(connection, [request[:1]], [1, 2])
        connection.sendall(request[1:])
        connection.shutdown(socket.SHUT_WR)
        engine = connection.recv(64)
    # None answers if the process has ended, nor is there a file if the engine has.
    with suppress(ProcessLookupError):
        if engine:
            select.select([os.pidfd_open(int(engine))], [], [])


if __name__ == "__main__":
    if sys.argv[1].isdecimal():
        serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
    else:
        run(sys.argv[1], sys.argv[2:])
