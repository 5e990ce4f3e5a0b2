"""Errors of the local runner; each message is one line for the person at the terminal.

LocalError
  Refused        the input cannot be run here as it stands: change it (usage, nothing was started)
  StartFailed    a process died or never got ready; the message ends with its log's last lines
  NoStack        there is no running stack to tell about: start one, or name its run directory
"""


class LocalError(Exception):
    """Root of this package's errors."""


class Refused(LocalError):
    """The pods, the machine or the options do not fit together: nothing was started."""


class StartFailed(LocalError):
    """A container ended or stayed unready while the stack came up: everything was stopped."""


class NoStack(LocalError):
    """There is no running stack to tell about."""
