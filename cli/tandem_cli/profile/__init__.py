"""`tandem profile`: measures an engine, and writes what `tandem plan --profile` reads.

`command` is the command, `measure` sends the requests, `file` is what is written.
"""

from .command import profile

__all__ = ["profile"]
