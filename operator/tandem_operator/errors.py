"""What can be wrong with pools. The messages are for the person who wrote the YAML.

DocumentError (contract)
  PoolsError       one line for each fault, each with file:line, field, cause and fix
    InvalidPool    objects that are no valid pools by themselves: nothing can be said about pairs
    InvalidSet     valid pools that do not fit together
"""

from collections.abc import Sequence

from tandem_contract.documents import DocumentError


class PoolsError(DocumentError):
    """Root of this package's errors; `lines` holds one fault each."""

    def __init__(self, faults: Sequence[DocumentError]) -> None:
        self.lines = tuple(str(fault) for fault in faults)
        super().__init__("\n".join(self.lines))


class InvalidPool(PoolsError):
    """At least one object breaks its schema or a rule, or is no pool at all."""


class InvalidSet(PoolsError):
    """A name is taken twice, a reference leads nowhere, or two pools of a set contradict."""
