"""Errors in PrefillPools and DecodePools. The messages address the author of the YAML.

DocumentError (contract)
  PoolsError       one line per error, each with file:line, field, cause and fix
    InvalidPool    an object is not a valid pool by itself; pairs are not checked then
    InvalidSet     the pools are valid but contradict each other
"""

from collections.abc import Sequence

from tandem_contract.documents import DocumentError


class PoolsError(DocumentError):
    """Root of this package's errors; `lines` has one entry per error."""

    def __init__(self, faults: Sequence[DocumentError]) -> None:
        self.lines = tuple(str(fault) for fault in faults)
        super().__init__("\n".join(self.lines))


class InvalidPool(PoolsError):
    """At least one object violates its schema or a rule, or is no pool at all."""


class InvalidSet(PoolsError):
    """A duplicate name, a reference to a missing pool, or two pools of a set that contradict."""
