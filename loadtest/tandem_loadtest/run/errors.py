"""Errors of a benchmark; the message is one line that says what was wrong, where, and what to do.

    BenchError
    ├── OptionsError     the options do not fit together: correct them
    ├── NotReadyError    the target, or the reference, cannot be used: correct the URL or start it
    └── WorkloadFailed   the workload cannot be made: correct its settings or its file

A worker process that dies in the middle of a run raises nothing: what was measured is kept, and the
report's `generator.warnings` says so.
"""


class BenchError(Exception):
    """The benchmark cannot be run."""


class OptionsError(BenchError, ValueError):
    """Options that do not fit together; the message says which and what to write instead."""


class NotReadyError(BenchError):
    """The server refuses the check before the run, or does not answer it."""


class WorkloadFailed(BenchError):
    """A setting or a file of the workload cannot be used, or no worker process could start."""
