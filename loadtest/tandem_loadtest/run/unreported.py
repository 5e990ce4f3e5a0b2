"""Accounts for the requests that a worker process had not reported when it died."""

from collections.abc import Iterator
from itertools import islice

from ..records import Record
from .load import has_known_end, sessions_of, writer_of
from .turns import unsent
from .worker_link import WorkerLink

REASON = "its worker process died before it reported the request"


def unreported(link: WorkerLink, *, last_end: float, died: float) -> Iterator[Record]:
    """A record for every request of the worker's schedule without one; their outcome is `unsent`.

    Where the schedule does not say which sessions begin (in closed loop, those before the end of
    the run), these are the sessions that had begun by the worker's last message.

    In closed loop, the intended time of a session is not known: `last_end`, when an answer ended
    for the last time, for those that had begun; `died` for the others. It is `died` for the turns
    after the first that is unreported, too.
    """
    spec, begun = link.spec, link.batch.begun
    sessions = sessions_of(spec, writer_of(spec))
    if not has_known_end(spec):
        sessions = islice(sessions, begun)
    for number, session in enumerate(sessions):
        start = session.start
        if start is None:
            start = last_end if number < begun else died
        for turn in range(len(session.turns)):
            if (session.index, turn) not in link.reported:
                yield unsent(session, turn, spec.target.model, start, REASON)
                # Those that follow would have been due later.
                start = max(start, died)
