"""Decoding of single members of a request's body.

Errors: `BadBody`, for the client: what is wrong and where.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

Members = Mapping[str, Raw]
"""The undecoded members of a JSON object."""


class BadBody(ValueError):
    """The body is not a request of its kind; answered with 400."""

    @property
    def param(self) -> str | None:
        """The field that is wrong: what the message begins with; None: the body as a whole."""
        # From the message: it alone comes back from the process that reads large bodies.
        field = str(self).partition(":")[0].partition("[")[0].partition(".")[0]
        return field if field.isidentifier() else None


def decode_field(members: Members, name: str, decoder: msgspec.json.Decoder[Any]) -> Any:
    """The member `name`, which must be there. Raises BadBody when it has another type."""
    try:
        return decoder.decode(members[name])
    except msgspec.ValidationError as err:
        raise BadBody(f"{name}: {err}") from err
