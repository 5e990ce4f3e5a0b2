"""How close two pods are, as far as a transfer of KV between them is concerned."""

from enum import IntEnum


class FabricClass(IntEnum):
    """The fabric class of a pair of pods; the value is an index into figures per class."""

    SAME_NODE = 0
    """Shared memory or NVLink."""
    SAME_DOMAIN = 1
    """On other nodes of one fabric domain: a rack, an RDMA island, a zone."""
    ELSEWHERE = 2
    """Any other pair, and any of which too little is known."""

    @property
    def word(self) -> str:
        """As in traces, reports and samples that the EPP writes: `same_node`."""
        return self.name.lower()


__all__ = ["FabricClass"]
