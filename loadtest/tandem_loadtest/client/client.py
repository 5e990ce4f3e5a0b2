"""The client: sends one call and measures it."""

from time import monotonic
from typing import Final, Self

from tandem_contract import headers
from tandem_contract.paths import RoutingPath
from tandem_contract.request_kinds import RequestKind

from ..calls import Answer, Call, Result
from .answers import AnswerError
from .bodies import asks_usage
from .exchange import Exchange
from .http import Ending, Requester
from .outcome import Facts, classify, promises_of
from .reasons import Redactor
from .request import RequestWriter
from .settings import ClientSettings, parse_url, tls_context

_ROUTING_PATH: Final = headers.ROUTING_PATH.encode()
_PREFILL_BACKEND: Final = headers.PREFILL_BACKEND.encode()
_DECODE_BACKEND: Final = headers.DECODE_BACKEND.encode()
_PATHS: Final = {path.value.encode(): path for path in RoutingPath}


class Client:
    """A client of one server, with an unlimited pool of connections."""

    def __init__(self, settings: ClientSettings) -> None:
        """Raises SettingsError for a setting that cannot be used."""
        self._timeout = settings.timeout
        origin = parse_url(settings.url)
        tls = tls_context(settings.ca_file) if origin.is_tls else None
        self._requester = Requester(origin.host, origin.port, tls)
        self._writer = RequestWriter(settings, origin)
        self._redactor = Redactor(settings.headers)
        usage = asks_usage(settings)
        self._promises = {
            (kind, stream): promises_of(kind, stream=stream, usage=usage)
            for kind in RequestKind
            for stream in (False, True)
        }

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._requester.close()

    async def send(self, call: Call, *, request_id: str | None = None) -> Result:
        """Post one call and read its answer to the end. Its failure is in the result.

        Cancelling closes the connection. Raises ValueError for a `request_id` that is no value of
        a header.
        """
        exchange = Exchange(call, monotonic(), self._redactor)
        request = self._writer.write(call, exchange.kind, request_id)
        ending = await self._requester.send(request, exchange, self._timeout)
        return self._result(exchange, ending)

    def _result(self, exchange: Exchange, ending: Ending) -> Result:
        answer, answer_error = _answer(exchange, ending)
        call, status, fields = exchange.call, exchange.status, exchange.fields
        facts = Facts(
            status,
            exchange.message() if status is not None and status != 200 else "",
            answer_error,
            self._timeout_reason(ending) if ending.timed_out else None,
            ending.lost,
            answer.finish_reason,
            answer.usage is not None,
            exchange.has_last_event,
        )
        outcome, error = classify(facts, self._promises[exchange.kind, call.stream])
        if error is not None:
            # Not only the server's text: an exception's or a header's may have as much in it.
            error = self._redactor.clean(error)
        return Result(
            call,
            status,
            _PATHS.get(fields.get(_ROUTING_PATH, b"")),
            _text(fields.get(_PREFILL_BACKEND)),
            _text(fields.get(_DECODE_BACKEND)),
            answer,
            error,
            outcome,
            exchange.started,
            ending.sent,
            exchange.first_token,
            exchange.last_token,
            ending.at,
            tuple(exchange.gaps),
            int(ending.is_resent),
        )

    def _timeout_reason(self, ending: Ending) -> str:
        if ending.sent is None:
            return f"no connection within {self._timeout:g} s"
        return f"timed out after {self._timeout:g} s"


def _answer(exchange: Exchange, ending: Ending) -> tuple[Answer, str | None]:
    """The answer, or the part of it that came; and why it is an error, or none of its API's."""
    # The part of a body that is not streamed cannot be parsed.
    is_partial = ending.lost is not None or ending.timed_out
    if is_partial and not exchange.is_stream:
        return Answer(), ending.refused
    try:
        return exchange.answer(), ending.refused
    except AnswerError as err:
        return Answer(), ending.refused or str(err)


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
