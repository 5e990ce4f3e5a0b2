"""Contains the EPP's own bugs: no request is reset because of one.

    with faults.contained("learn"):
        ...                            statistics, estimates, indexes: later choices are worse

    except Exception as err:
        faults.count("place", err)     the request is placed in another way

An exception that left the ext_proc stream would end it, and Envoy resets a request whose stream
fails in FULL_DUPLEX_STREAMED mode: the client would lose an answer that the engine has computed.
"""

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from prometheus_client import CollectorRegistry, Counter

_log: Final = logging.getLogger(__name__)


class Faults:
    """Counts faults, and logs the first one of each kind."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counter = Counter(
            "tandem_epp_faults_total",
            "Faults of the EPP itself, by task. place: a request was placed on any pod without a "
            "choice, or answered with 500; prepare: a prompt was not read ahead, or not matched "
            "with the precise index; share: a placement was not told to other replicas; trace: a "
            "decision was not traced; learn: nothing was learned from a response's headers; "
            "session: a response got no session token; end: a request's end was not counted in "
            "full; timing: a response's x-tandem-timing was ignored, because a figure in it is "
            "impossible. The log has the first of each kind.",
            ("task",),
            registry=registry,
        )
        self._logged = set[tuple[str, str]]()
        """Tasks and kinds of the faults that were logged. Bounded: a kind is a place in the
        code."""

    @contextmanager
    def contained(self, task: str) -> Iterator[None]:
        """Count and log an exception within; what follows goes on without it."""
        try:
            yield
        # The boundary between statistics and clients' answers: whatever the fault is, it must not
        # pass here. It is a bug nevertheless, so it is counted and logged.
        except Exception as err:  # noqa: BLE001
            self.count(task, err)

    def count(self, task: str, err: Exception) -> None:
        """Count and log an exception that was caught where it was raised to."""
        frames = traceback.extract_tb(err.__traceback__)
        kind = type(err).__name__
        # Not the exception's message, which may quote a prompt.
        text = "".join(traceback.format_list(frames))
        self._count(
            task,
            f"{kind} {frames[-1].filename}:{frames[-1].lineno}",
            f"bug in the EPP: {kind} (task {task}); docs/reference/metrics.md says what it costs\n"
            f"{text}",
        )

    def ignore_timing(self, backend: str) -> None:
        """Count that a response of `backend` has an impossible figure in its timing header."""
        self._count(
            "timing",
            "",
            f"backend {backend}: a figure in x-tandem-timing is impossible, so the header is "
            "ignored; tandem_epp_faults_total counts further ones",
        )

    def _count(self, task: str, kind: str, message: str) -> None:
        self._counter.labels(task).inc()
        if (task, kind) not in self._logged:
            self._logged.add((task, kind))
            _log.error("%s", message)
