"""A client of the sidecar that distinguishes complete answers, clear errors and broken ones."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import aiohttp
import msgspec

from tandem_contract import headers
from tandem_contract.commandline import HostPort
from tandem_loadtest.calls import Answer, Call
from tandem_loadtest.client.answers import AnswerError, server_message
from tandem_loadtest.client.bodies import body_of
from tandem_loadtest.client.openai import OpenAIStream, parse_answer
from tandem_loadtest.client.outcome import Facts, Promises, classify
from tandem_loadtest.client.settings import ClientSettings
from tandem_loadtest.client.sse import EventParser
from tandem_loadtest.records import Outcome

from .engine import SERVED

HUNG: Final = "hung"
BROKEN: Final = "broken off"

STREAMED: Final = Promises(usage=True, last_event="[DONE]")
"""What the streams of `call`s end with."""


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
        self._parser, self._stream = EventParser(), OpenAIStream()

    async def wait_for_first_bytes(self) -> None:
        """Return with the first bytes."""
        self._take(await self._response.content.readany())

    async def read_to_end(self) -> ClientResult:
        """Read the answer to its end; returns all of it."""
        error = ""
        try:
            async for data in self._response.content.iter_any():
                self._take(data)
            facts = facts_of(self._stream.so_far(), has_last_event=self._stream.has_ended)
            outcome, reason = classify(facts, STREAMED)
            error = BROKEN if outcome is Outcome.TRUNCATED else reason or ""
        except AnswerError as err:
            error = str(err)
        except TimeoutError:
            error = HUNG
        except aiohttp.ClientError:
            error = BROKEN
        return replace(head(self._response), answer=self._stream.so_far(), error=error)

    def _take(self, data: bytes) -> None:
        self._stream.add_all(self._parser.complete(data))


def facts_of(answer: Answer, *, has_last_event: bool) -> Facts:
    """The facts of a complete HTTP response."""
    return Facts(
        200,
        finish_reason=answer.finish_reason,
        has_usage=answer.usage is not None,
        has_last_event=has_last_event,
    )


def members_of(call: Call) -> dict[str, Any]:
    """The JSON object to post."""
    return body_of(call, call.endpoint, ClientSettings(url="", model=SERVED))


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
    body = msgspec.json.encode(members_of(call))
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
                return replace(result, error=str(server_message(body)))
            answer = parse_answer(body)
            _, reason = classify(facts_of(answer, has_last_event=False), Promises())
            return replace(result, answer=answer, error=f"{BROKEN}: {reason}" if reason else "")
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
