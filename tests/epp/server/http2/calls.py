"""A session whose handler echoes, and records what happens to its calls."""

from dataclasses import dataclass, field

from tandem_epp.server.http2.connection import Connection
from tandem_epp.server.http2.errors import CallFault, Status
from tandem_epp.server.http2.headers import BlockCache
from tandem_epp.server.http2.limits import Limits
from tandem_epp.server.http2.session import Call, GrpcSession

from .client import PATH, START, Frame, parse


class Echo:
    """Answers each message with itself. Some messages ask for something else."""

    def __init__(self, calls: "Calls", call: Call) -> None:
        self.calls, self.call = calls, call
        self.messages: list[bytes] = []
        self.is_half_closed = False
        self.ends = 0
        calls.handlers.append(self)

    def on_message(self, message: bytes) -> None:
        assert not self.ends, "a message after the end"
        self.messages.append(message)
        match message:
            case b"refuse":
                raise CallFault(Status.INVALID_ARGUMENT, "refused")
            case b"fail":
                raise KeyError("secret")
            case b"finish":
                self.call.finish()
            case b"silent":
                pass
            case _:
                self.call.send(message)

    def on_over_budget(self) -> None:
        pass

    def on_half_close(self) -> None:
        self.is_half_closed = True
        self.call.finish()

    def on_end(self) -> None:
        self.ends += 1
        if b"fail at the end" in self.messages:
            raise KeyError("end")


@dataclass
class Calls:
    """A session with its handlers."""

    limits: Limits = field(default_factory=Limits)
    handlers: list[Echo] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    deadlines: list[float] = field(default_factory=list)
    session: GrpcSession = field(init=False)

    def __post_init__(self) -> None:
        self.session = GrpcSession(
            Connection(self.limits, BlockCache()),
            {PATH: lambda call: Echo(self, call)},
            lambda path: (200, b"ok\n") if path == "/healthz" else None,
            on_error=self.errors.append,
            on_deadline=lambda _, seconds: self.deadlines.append(seconds),
        )

    @property
    def connection(self) -> Connection:
        return self.session.connection

    def start(self) -> "Calls":
        self.answers(START)
        return self

    def answers(self, *parts: bytes, now: float = 0.0) -> list[Frame]:
        """The frames that answer `parts`."""
        self.session.receive(b"".join(parts), now)
        return parse(self.connection.take())


def check_invariants(calls: Calls) -> None:
    """What holds at any time, and after the connection's end."""
    assert not calls.errors
    connection = calls.connection
    assert {call.stream.id for call in calls.session.calls} <= set(connection.streams)
    assert all(handler.ends <= 1 for handler in calls.handlers)
    assert len(connection._closed) <= 1024
    unsent = sum(stream.unsent for stream in connection.streams.values())
    assert connection.sender._unsent == unsent
    if connection.fault is not None:
        assert not connection.streams
        assert not calls.session.calls
        assert connection.sender._unsent == 0
    calls.session.lost()
    assert all(handler.ends == 1 for handler in calls.handlers)
