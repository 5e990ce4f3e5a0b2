"""A client of the sidecar that distinguishes complete answers, clear errors and broken ones."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

import aiohttp
import msgspec

from tandem_contract import headers
from tandem_contract.commandline import HostPort
from tandem_loadtest.answers import AnswerBuilder, AnswerError, error_message, parse_answer
from tandem_loadtest.calls import Answer, Call
from tandem_loadtest.sse import EventParser

from .engine import SERVED

HUNG: Final = "hung"
BROKEN: Final = "broken off"


@dataclass(frozen=True)
class ClientResult:
    """The answer as a client sees it."""

    status: int = 0
    path: str = ""
    prefill: str = ""
    """Name of the prefill backend."""
    retry_after: str = ""
    answer: Answer | None = None
    error: str = ""
    """Empty for a complete answer; else the server's message, or HUNG or BROKEN without one."""

    @property
    def tokens(self) -> list[int]:
        return list((self.answer and self.answer.token_ids) or ())


class Stream:
    """A streamed answer in progress."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._parser, self._builder = EventParser(), AnswerBuilder()

    async def wait_for_first_bytes(self) -> None:
        """Return with the first bytes."""
        self._take(await self._response.content.readany())

    async def read_to_end(self) -> ClientResult:
        """Read the answer to its end; returns all of it."""
        error = ""
        try:
            async for data in self._response.content.iter_any():
                self._take(data)
            self._builder.finish()
        except AnswerError as err:
            # The builder's message for a stream that stops without an end begins so.
            error = BROKEN if str(err).startswith("the stream ended") else str(err)
        except TimeoutError:
            error = HUNG
        except aiohttp.ClientError:
            error = BROKEN
        return replace(head(self._response), answer=self._builder.so_far(), error=error)

    def _take(self, data: bytes) -> None:
        for event in self._parser.feed(data):
            self._builder.add(event)


@asynccontextmanager
async def open_response(
    http: aiohttp.ClientSession,
    url: str,
    call: Call,
    prefills: Iterable[HostPort] = (),
    request_id: str = "",
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The response's head; leaving early closes the connection."""
    fields = {
        "content-type": "application/json",
        headers.PREFILLER_HOST_PORT: ",".join(map(str, prefills)),
        headers.REQUEST_ID: request_id,
    }
    body = msgspec.json.encode(call.body(SERVED))
    sent_fields = {name: value for name, value in fields.items() if value}
    async with http.post(url + call.path, data=body, headers=sent_fields) as response:
        yield response


async def ask(
    http: aiohttp.ClientSession,
    url: str,
    call: Call,
    prefills: Iterable[HostPort] = (),
    request_id: str = "",
) -> ClientResult:
    """Send the request and read the answer to its end."""
    try:
        async with open_response(http, url, call, prefills, request_id) as response:
            if response.status == 200 and call.stream:
                return await Stream(response).read_to_end()
            body, result = await response.read(), head(response)
            if response.status != 200:
                return replace(result, error=error_message(body))
            return replace(result, answer=parse_answer(body))
    except AnswerError as err:
        return replace(result, error=f"{BROKEN}: {err}")
    except TimeoutError:
        return ClientResult(error=HUNG)
    except aiohttp.ClientError:
        return ClientResult(error=BROKEN)


def head(response: aiohttp.ClientResponse) -> ClientResult:
    """The facts in the head of an answer."""
    return ClientResult(
        response.status,
        response.headers.get(headers.ROUTING_PATH, ""),
        response.headers.get(headers.PREFILL_BACKEND, ""),
        response.headers.get(headers.RETRY_AFTER, ""),
    )
