"""Puts the model that a client asked for back into the answer of the model that served it. Pure.

Only gateways that send response bodies to the EPP can have this done. A member `"model"` with the
served name is replaced wherever it stands, as in llm-d's router; in generated text its quotes are
escaped.
"""

import re
from typing import Final

import msgspec

_KEY: Final = b'"model"'


class AnsweredModel:
    """The names of one answer, which comes in chunks."""

    def __init__(self, served: str, asked: str) -> None:
        name = msgspec.json.encode(served)
        self._pattern = re.compile(rb'("model": ?)' + re.escape(name))
        self._whole = (_KEY + b":" + name, _KEY + b": " + name)
        self._asked = msgspec.json.encode(asked)
        self._held = b""
        """The end of the chunks so far, which may be the beginning of a member."""

    def replace(self, body: bytes) -> bytes:
        """A body, or a chunk that must be answered at once."""
        return self._pattern.sub(lambda match: match[1] + self._asked, body)

    def feed(self, chunk: bytes, *, is_last: bool) -> bytes:
        """What is to be sent of the answer up to this chunk."""
        body = self.replace(self._held + chunk)
        end = len(body) if is_last else self._open_member(body)
        self._held = body[end:]
        return body[:end]

    def _open_member(self, body: bytes) -> int:
        """Where a member begins that may go on in the next chunk; else the end."""
        at = body.rfind(_KEY, max(0, len(body) - len(self._whole[1])))
        if at >= 0 and any(whole.startswith(body[at:]) for whole in self._whole):
            return at
        sizes = range(len(_KEY) - 1, 0, -1)
        return len(body) - next((size for size in sizes if body.endswith(_KEY[:size])), 0)
