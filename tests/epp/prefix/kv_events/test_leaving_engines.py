"""An engine that ends together with its subscriber, as when its pod is deleted."""

import subprocess
import sys


def test_the_event_loop_never_waits_for_zmq() -> None:
    # A process, since a loop that waits for ZMQ's lock cannot be interrupted.
    command = [sys.executable, "-m", "tests.epp.prefix.kv_events.leaving_engines"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert ended.stdout == "every subscriber ended\n", ended.stderr
