"""An OpenAI client that measures, and the drivers over it.

    async with Client("http://127.0.0.1:8080", "tiny") as client:
        result = await client.send(Call("Once upon a time", max_tokens=16))
        results = await run_open_loop(client.send, [Timed(0.0, call), Timed(0.25, other)])
        results = await converse(client.send, script)

A request that fails raises nothing: `Result.error` has the reason.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from time import perf_counter
from typing import Final, Self

import aiohttp
import msgspec

from tandem_contract import headers
from tandem_contract.paths import RoutingPath

from .answers import AnswerBuilder, AnswerError, error_message, parse_answer
from .calls import Answer, Call, Result
from .conversations import Script
from .sse import EventParser

Send = Callable[[Call], Awaitable[Result]]

_PATHS: Final = {path.value: path for path in RoutingPath}


class Client:
    """A client of one endpoint and one model name, with an unlimited connection pool."""

    def __init__(self, url: str, model: str, *, timeout: float = 300.0) -> None:
        """`url` with or without `/v1`; `timeout` in seconds for a whole answer."""
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._timeout = timeout
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            # No limit: a request that waits here for a connection would hide the server's queue.
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._timeout),
            # Cookies could pin all requests to one backend.
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def send(self, call: Call, *, request_id: str | None = None) -> Result:
        """Post one call and read its answer to the end."""
        pending = _PendingCall(call)
        try:
            await self._post(pending, request_id)
        except AnswerError as err:
            pending.error = str(err)
        # Raised while reading a stream; other answers are decoded by `parse_answer`.
        except UnicodeDecodeError:
            pending.error = "the stream is not UTF-8"
        except TimeoutError:
            # aiohttp's total timeout covers the whole answer, so the part that came is kept.
            pending.error = f"timed out after {self._timeout:g} s"
        except (aiohttp.ClientError, OSError) as err:
            pending.error = f"{type(err).__name__}: {err}".rstrip(": ")
        return pending.result()

    async def _post(self, pending: "_PendingCall", request_id: str | None) -> None:
        call = pending.call
        request_headers = {"content-type": "application/json"}
        if request_id:
            request_headers[headers.REQUEST_ID] = request_id
        async with self._session.post(
            self._url + call.path,
            data=msgspec.json.encode(call.body(self._model)),
            headers=request_headers,
            # A redirect is reported as a failure: the endpoint itself is measured.
            allow_redirects=False,
        ) as response:
            # Before the body: a failure while reading it still reports where the request was sent.
            pending.status, pending.headers = response.status, response.headers
            if response.status != 200:
                raise AnswerError(f"HTTP {response.status}: {error_message(await response.read())}")
            if call.stream:
                await pending.read_stream(response.content)
            else:
                pending.answer = parse_answer(await response.read())


class _PendingCall:
    """The state of one request until its result."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.status: int | None = None
        self.headers: Mapping[str, str] = {}
        self.answer = Answer()
        self.error: str | None = None
        self._token_times: list[float] = []
        self._started = perf_counter()

    async def read_stream(self, content: aiohttp.StreamReader) -> None:
        """Read events to the end of the stream; when it breaks off, keep the part that came."""
        parser, builder = EventParser(), AnswerBuilder()
        try:
            async for data in content.iter_any():
                # Once per read: events that arrive together get the same time.
                now = perf_counter()
                for event in parser.feed(data):
                    if builder.add(event):
                        self._token_times.append(now)
            # Raises unless the last event came: a truncated stream counts as failed.
            builder.finish()
        finally:
            self.answer = builder.so_far()

    def result(self) -> Result:
        """The result of the call, which has ended now."""
        times = self._token_times
        return Result(
            call=self.call,
            status=self.status,
            routing_path=_PATHS.get(self.headers.get(headers.ROUTING_PATH, "")),
            prefill_backend=self.headers.get(headers.PREFILL_BACKEND),
            decode_backend=self.headers.get(headers.DECODE_BACKEND),
            answer=self.answer,
            ttft=times[0] - self._started if times else None,
            itls=tuple(later - earlier for earlier, later in pairwise(times)),
            total=perf_counter() - self._started,
            error=self.error,
        )


@dataclass(frozen=True, slots=True)
class Timed:
    """A call and the time to send it, in seconds after the start."""

    at: float
    call: Call


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run."""

    total: int
    sent: int = 0
    finished: int = 0
    """Calls that have ended, failed ones included."""
    failed: int = 0


async def run_open_loop(
    send: Send,
    calls: Sequence[Timed],
    *,
    max_in_flight: int = 1000,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> list[Result]:
    """Send every call at its time, without waiting for answers; results in the order of `calls`.

    A call whose time comes while `max_in_flight` answers are awaited is not sent later, as that
    would hide the overload: its result is a failure. Cancelling the run closes all its
    connections. `on_progress` is called for each call that is sent and each that ends.
    """
    # A result for each call from the start: cancelled and unsent calls have one, too.
    results = [Result(timed.call, error="not sent") for timed in calls]
    progress = Progress(len(calls))
    clock = asyncio.get_running_loop().time

    async def send_call(index: int) -> None:
        results[index] = await send(calls[index].call)
        end(index)

    def end(index: int) -> None:
        nonlocal progress
        failed = progress.failed + (not results[index].ok)
        progress = replace(progress, finished=progress.finished + 1, failed=failed)
        on_progress(progress)

    start = clock()
    async with asyncio.TaskGroup() as group:
        # Traces are in order of arrival, other callers' lists need not be.
        for index in sorted(range(len(calls)), key=lambda i: calls[i].at):
            # From the start, not from the call before: delays do not add up.
            await asyncio.sleep(max(0.0, start + calls[index].at - clock()))
            in_flight = progress.sent - progress.finished
            progress = replace(progress, sent=progress.sent + 1)
            on_progress(progress)
            if in_flight >= max_in_flight:
                reason = f"not sent: {in_flight} requests were in flight already"
                results[index] = replace(results[index], error=reason)
                end(index)
            else:
                # Not awaited: in an open loop, a slow answer never delays the next request.
                group.create_task(send_call(index))
    return results


async def converse(
    send: Send, script: Script, *, on_result: Callable[[Result], None] = lambda _: None
) -> list[Result]:
    """Send a conversation's requests one after the other; a failed one ends it."""
    results: list[Result] = []
    for step in range(len(script.steps)):
        result = await send(script.call(step, [r.answer.text for r in results]))
        results.append(result)
        on_result(result)
        # The next question repeats all answers, of which one is missing now.
        if not result.ok:
            break
    return results
