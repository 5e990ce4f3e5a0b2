"""The file of a profile: what was measured, point by point, and how exact the fit is.

Errors: `ProfileError`, one line.
"""

from pathlib import Path

import msgspec

from tandem_planner.sizing.profile import DecodePoint, FittedEngine, PrefillPoint, fitted


class ProfileError(ValueError):
    """The file is no profile, or is of something else; one line for the user."""


class HeldOut(msgspec.Struct, frozen=True):
    """Relative errors of a load that the fit has not seen: predicted over measured, less 1."""

    requests: int
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float

    @property
    def largest(self) -> float:
        """The largest of the errors of medians."""
        return max(abs(self.ttft_p50), abs(self.itl_p50))


class ProfileFile(msgspec.Struct):
    """A profile; times in seconds."""

    model: str
    url: str
    tensor: int = 1
    """GPUs of the engine."""
    prefills: list[PrefillPoint] = []
    decodes: list[DecodePoint] = []
    held_out: HeldOut | None = None
    """None: not yet measured."""

    def fitted(self) -> FittedEngine:
        """The engine. Raises ProfileError."""
        try:
            return fitted(self.prefills, self.decodes)
        except ValueError as err:
            raise ProfileError(f"the profile is not complete: {err}: run tandem profile") from err


def read_profile(file: Path) -> ProfileFile:
    """Raises ProfileError."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=ProfileFile)
    except OSError as err:
        raise ProfileError(f"{file}: cannot read it: {err.strerror}") from err
    except msgspec.DecodeError as err:
        raise ProfileError(f"{file}: no profile: {err}") from err


def write_profile(file: Path, profile: ProfileFile) -> None:
    """Raises ProfileError."""
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
    except OSError as err:
        raise ProfileError(f"{file}: cannot write it: {err.strerror}") from err
