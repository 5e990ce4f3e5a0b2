"""A row of the tables that say what becomes of each flag of llm-d's EPP and sidecar."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from .go_flags import GO_STRING, GoType


class Treatment(StrEnum):
    """What becomes of a flag; the value is the word in docs/reference/llm-d.md."""

    WORKS = "works"
    NOT_NEEDED = "accepted, not needed"
    """The program always does what it asks for."""
    NO_EFFECT = "accepted without effect"
    REFUSED = "refused"
    """With any value but those in `off`."""


@dataclass(frozen=True, slots=True)
class LlmdFlag:
    """One flag of a program of llm-d."""

    name: str
    treatment: Treatment
    text: str
    """What it does here; why it has no effect; or why it is refused, and what to use."""
    type: GoType[Any] = GO_STRING
    default: str = ""
    """As llm-d prints it."""
    own: str | None = None
    """The parameter of the EPP's own flag for the same setting: only one of both may be given."""
    off: tuple[Any, ...] = ()
    """Values that llm-d treats as off, which need no word about them."""
    environment: str | None = None
    """llm-d's environment variable for it."""

    @property
    def parameter(self) -> str:
        """Its name among click's parameters."""
        return "llmd_" + self.name.replace("-", "_")
