"""A picker that does not follow a gateway's list of allowed backends."""

import msgspec

from ..exchange import HttpRequest
from .placement import Placement
from .tenant_salts import SaltingPicker


class HintlessPicker(SaltingPicker):
    """Picks among all backends."""

    def place(self, request: HttpRequest, body: bytes | None, now: float) -> Placement:
        """As `SaltingPicker.place`, without the request's subset hint."""
        return super().place(msgspec.structs.replace(request, subset=None), body, now)
