"""Errors of the channel; the package's docstring says what each means."""


class PeerError(Exception):
    """The connection to a peer must be closed; the dialer opens a new one."""


class PeerGone(PeerError):
    """The connection ended, or the peer was silent for too long."""
