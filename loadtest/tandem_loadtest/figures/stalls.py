"""The longest time for which a client received nothing. Pure."""

from ..records import Record
from .model import Stall


def longer_stall(record: Record, than: float) -> Stall | None:
    """The longest wait of a request's client if it is longer than `than` seconds, else None.

    A client waits from the time sent to the first token, between tokens, and from the last token to
    the end. An answer that is not streamed, and one that was lost before its first token, is a
    single wait for it.
    """
    if record.sent is None:
        return None
    longest = None
    first, last, ended = record.first_token, record.last_token, record.ended
    received = ended if first is None else first
    if received is not None and (seconds := received - record.sent) > than:
        than = seconds
        longest = Stall(seconds=seconds, at=record.sent, phase="first token", request=record.index)
    gaps = record.gaps
    if first is not None and gaps and (seconds := max(gaps)) > than:
        than = seconds
        at = first + sum(gaps[: gaps.index(seconds)])
        longest = Stall(seconds=seconds, at=at, phase="next token", request=record.index)
    if last is not None and ended is not None and (seconds := ended - last) > than:
        longest = Stall(seconds=seconds, at=last, phase="end", request=record.index)
    return longest
