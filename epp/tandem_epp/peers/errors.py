"""Errors of the channel; the package's docstring draws their tree."""


class PeerError(Exception):
    """The connection to a peer must be closed; the dialer opens a new one."""


class PeerRejected(PeerError):
    """The peer is none of ours, or a message is not the peer's; `reason` is a metric label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class PeerGone(PeerError):
    """The connection ended, or the peer was silent for too long."""
