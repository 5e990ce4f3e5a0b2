"""The targets by name."""

from collections.abc import Callable, Mapping
from typing import Final

from . import body, form, http2, http_reader, plan, sse, store

TARGETS: Final[Mapping[str, Callable[[bytes], None]]] = {
    "body": body.check,
    "form": form.check,
    "http-reader": http_reader.check,
    "http2": http2.check,
    "plan": plan.check,
    "sse": sse.check,
    "store": store.check,
}
"""Each raises AssertionError, or any exception of the code under test, for an input that fails."""
