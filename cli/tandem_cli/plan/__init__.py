"""`tandem plan`: how many pods of what a workload needs, and whether separate pools pay.

`command` declares the command line, `inputs` turns it into what `tandem_planner.sizing.search`
takes, `report` is the answer, `view` prints it, and `resources` writes it as custom resources.
"""

from .command import plan

__all__ = ["plan"]
