"""Errors of the local runner; each message is one line for the user.

LocalError
  SetupError     the input, the machine or the options do not fit together: nothing was started
  StartFailed    a container ended or never became ready; the message ends with its log's last lines
  NoStack        no stack runs in this directory: start one, or name another run directory
"""


class LocalError(Exception):
    """Root of this package's errors."""


class SetupError(LocalError):
    """The stack or pod cannot be started with this input on this machine; nothing was started."""


class StartFailed(LocalError):
    """A container ended or stayed unready during start-up; everything was stopped."""


class NoStack(LocalError):
    """No stack runs in the run directory."""
