"""The error of a stream that cannot go on at its engine."""


class StreamBroken(Exception):
    """The stream holds something after which it does not go on; the message says what."""

    def __init__(self, problem: str, before: bytes = b"") -> None:
        """`before`: the events before it that the client may have, and has not got."""
        super().__init__(problem)
        self.before = before
