"""Errors of a stream that cannot go on at its engine.

StreamBroken         another engine may go on with it
  AnswerDiffers      none is tried: the client would wait for as uncertain an answer
"""


class StreamBroken(Exception):
    """The stream holds something after which it does not go on; the message says what."""

    def __init__(self, problem: str, before: bytes = b"") -> None:
        """`before`: the events before it that the client may have, and has not got."""
        super().__init__(problem)
        self.before = before


class AnswerDiffers(StreamBroken):
    """The engine generates another answer than the one that the client has the beginning of."""

    def __init__(self) -> None:
        super().__init__("another engine generates another answer")
