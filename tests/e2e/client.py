"""A client of the served endpoint: single requests and streams."""

import http.client
import json
import threading
from dataclasses import dataclass, field
from typing import Any, Self

from tandem_contract import headers

MODEL = "tiny-llama"
_SECONDS = 120


@dataclass(frozen=True)
class Answer:
    """A completed chat request."""

    status: int
    path: str | None
    """The routing path the sidecar reports."""
    text: str


def chat(address: str, prompt: str, *, tokens: int = 16, model: str = MODEL) -> Answer:
    """Send one chat request to `host:port` with greedy decoding."""
    connection = http.client.HTTPConnection(address, timeout=_SECONDS)
    try:
        connection.request(
            *("POST", "/v1/chat/completions", json.dumps(_body(prompt, tokens) | {"model": model})),
            {"content-type": "application/json"},
        )
        response = connection.getresponse()
        body = response.read()
        text = json.loads(body)["choices"][0]["message"]["content"] if response.status == 200 else (
            body.decode(errors="replace")
        )  # fmt: skip
        return Answer(response.status, response.getheader(headers.ROUTING_PATH), text)
    finally:
        connection.close()


def _body(prompt: str, tokens: int) -> dict[str, Any]:
    message = {"role": "user", "content": prompt}
    return {"model": MODEL, "messages": [message], "max_tokens": tokens, "temperature": 0}


@dataclass
class Stream:
    """A streamed response, read to its end by its own thread."""

    address: str
    prompt: str
    tokens: int
    decode: str | None = None
    """The pod that serves the decode."""
    chunks: int = 0
    ended: str = "not yet"
    """The last event: `[DONE]` if the stream is complete."""
    begun: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> Self:
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def finished(self) -> Self:
        """Wait for the end of the stream; returns self."""
        assert self._thread is not None
        self._thread.join(_SECONDS)
        return self

    @property
    def whole(self) -> bool:
        return self.ended == "[DONE]"

    def _read(self) -> None:
        connection = http.client.HTTPConnection(self.address, timeout=_SECONDS)
        body = _body(self.prompt, self.tokens) | {"stream": True, "ignore_eos": True}
        try:
            connection.request(
                *("POST", "/v1/chat/completions", json.dumps(body)),
                {"content-type": "application/json"},
            )
            response = connection.getresponse()
            self.decode = response.getheader(headers.DECODE_BACKEND)
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                self.ended = line.removeprefix(b"data: ").decode().strip()
                self.chunks += 1
                self.begun.set()
        except (OSError, http.client.HTTPException) as err:
            self.ended = repr(err)
        finally:
            self.begun.set()
            connection.close()
