"""`tandem bench`: load on any OpenAI-compatible server, and a report that can be believed.

`flags` declares the command line, `request` turns it into
`tandem_loadtest.run.options.BenchOptions`, `run` is the command, `display` the live display,
`tables` prints the report, and `compare` is `tandem bench compare`.
"""

from .run import command

__all__ = ["command"]
