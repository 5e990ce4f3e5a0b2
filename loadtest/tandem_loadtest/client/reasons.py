"""Reasons of failures that may be shown: without credentials, prompts and answers; pure.

    redactor = Redactor(settings.headers)
    redactor.shown(server_message(body), texts_of(call.prompt))

Servers repeat requests in their messages: the header that they refuse, the prompt that is too long.
Reasons are printed and stored in reports that people pass on.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from ..calls import Answer, Message, Prompt
from .answers import ServerMessage

PIECE: Final = 16
"""A message that has as many successive letters and digits of a prompt or an answer is left out.

In UTF-8 bytes; spaces, punctuation and escapes do not count, so that the form of the quotation does
not matter. Fewer would leave out messages with phrases such as "context length"."""
WHOLE: Final = 8
"""A message is also left out if it has the whole of a text shorter than `PIECE`, down to this."""
LEFT_OUT: Final = "message left out: it repeats the request or the answer"

_LIMIT: Final = 200
"""Characters of a server's message that are shown."""
_READ: Final = 1024
"""Characters of a server's message that are looked at."""
_SHORTEST_SECRET: Final = 4
"""Shorter values of headers are no credentials, and occur in every message."""
_SHORTEST_UNIQUE: Final = 8
"""Shorter credentials are replaced only where they are whole words."""
_PUBLIC: Final = frozenset({"accept", "content-type", "host", "user-agent"})
_SCHEME: Final = re.compile("^[A-Za-z][A-Za-z0-9-]* ")
_SEPARATOR: Final = re.compile("[ ;,=]+")

_ESCAPE_SEQUENCE: Final = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC: window title, clipboard, links
)
_ID: Final = re.compile(
    r"(?<![0-9a-z])(?:0x[0-9a-f]{6,}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{16,})"
    r"(?![0-9a-z])",
    re.IGNORECASE,
)
# Pydantic's errors, which vLLM and FastAPI pass on, repeat the request after this word.
_INPUT: Final = re.compile(r"""['"]input['"]\s*:""")
_JSON_ESCAPE: Final = re.compile(r"\\u([0-9a-fA-F]{4})|\\[bfnrt]")
_NO_TEXT: Final = bytes(byte for byte in range(128) if not chr(byte).isalnum())


class Redactor:
    """Makes reasons that may be shown, for a client that sends `headers`."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        secrets = {secret for pair in headers.items() for secret in _secrets(*pair)}
        # The longest first: a part of a credential must not be replaced before the whole.
        alternatives = [_pattern(secret) for secret in sorted(secrets, key=len, reverse=True)]
        self._secret = re.compile("|".join(alternatives)) if alternatives else None

    def clean(self, text: str) -> str:
        """`text` in one line, without credentials, control characters, and ids.

        Ids of requests and objects (UUIDs, 16 or more hexadecimal digits, addresses) become `…`:
        equal failures have equal reasons.
        """
        line = " ".join(_ESCAPE_SEQUENCE.sub("", text).split())
        line = "".join(filter(str.isprintable, line))
        if self._secret is not None:
            line = self._secret.sub("[redacted]", line)
        return _ID.sub("…", line)

    def shown(self, message: ServerMessage, texts: Iterable[str]) -> str:
        """A server's message, cut to a line; without its text if that repeats one of `texts`."""
        text = _INPUT.split(message.text[:_READ], maxsplit=1)[0]
        letters = _letters(_JSON_ESCAPE.sub(_unescape, text))
        if any(_repeats(letters, _letters(other)) for other in texts):
            line = LEFT_OUT
        else:
            line = self.clean(text)
        line = line if len(line) <= _LIMIT else line[:_LIMIT] + "…"
        return str(ServerMessage(line, message.kind))


def texts_of(prompt: Prompt, answer: Answer) -> Iterator[str]:
    """The texts that no reason may repeat; token ids as numbers with spaces between them."""
    if isinstance(prompt, str):
        yield prompt
    else:
        yield from (part.content for part in prompt if isinstance(part, Message))
        yield _numbers(part for part in prompt if isinstance(part, int))
    yield from (answer.text, answer.reasoning, answer.tool_calls)
    yield _numbers(answer.token_ids or ())


def _numbers(ids: Iterable[int]) -> str:
    return " ".join(map(str, ids))


def _secrets(name: str, value: str) -> Iterator[str]:
    """A header's value, the credentials after `Bearer` or another scheme, and their parts."""
    if name.lower() in _PUBLIC:
        return
    value = " ".join(value.split())
    credentials = _SCHEME.sub("", value)
    yield from (text for text in (value, credentials) if len(text) >= _SHORTEST_SECRET)
    yield from (part for part in _SEPARATOR.split(credentials) if len(part) >= _SHORTEST_UNIQUE)


def _pattern(secret: str) -> str:
    pattern = re.escape(secret)
    return pattern if len(secret) >= _SHORTEST_UNIQUE else rf"(?<!\w){pattern}(?!\w)"


def _unescape(escape: re.Match[str]) -> str:
    return chr(int(escape[1], 16)) if escape[1] else " "


def _letters(text: str) -> bytes:
    """The letters and digits of `text`, and all that is not ASCII."""
    return text.encode(errors="replace").translate(None, _NO_TEXT)


def _repeats(message: bytes, text: bytes) -> bool:
    """Whether the letters of a message have a piece of those of a text."""
    if len(text) < PIECE:
        return len(text) >= WHOLE and text in message
    # Each piece has one of these halves, so that few searches exclude nearly all messages.
    half = PIECE // 2
    for start in range(0, len(message) - half + 1, half):
        if message[start : start + half] in text:
            last = min(start, len(message) - PIECE)
            for begin in range(max(0, start - half), last + 1):
                if message[begin : begin + PIECE] in text:
                    return True
    return False
