"""What a configuration says that has no effect here, part by part, with the reason."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Notice:
    """A part of a configuration that is accepted and has no effect, or another one than in
    llm-d."""

    where: str
    """`file:line`."""
    part: str
    """The plugin or section."""
    reason: str
    is_lost: bool = True
    """Whether its user misses something; False: the EPP does the same without it."""
    gate: str = ""
    """The feature gate that it is about; empty: something else."""

    @property
    def line(self) -> int:
        """Of the file."""
        return int(self.where.rpartition(":")[2])

    def __str__(self) -> str:
        verdict = "has no effect" if self.is_lost else "is not needed"
        return f"{self.where}: {self.part} {verdict}: {self.reason}"
