"""A picker that does not follow a gateway's list of allowed backends."""

import msgspec

from .ext_proc.messages import HttpRequest
from .picker import EndpointPicker
from .placement import Placement


class HintlessPicker(EndpointPicker):
    """Picks among all backends."""

    def place(self, request: HttpRequest, body: bytes | None, now: float) -> Placement:
        """As `EndpointPicker.place`, without the request's subset hint."""
        return super().place(msgspec.structs.replace(request, subset=None), body, now)
