"""Finds out about a body what takes time or must wait, before the pick: `Preparation`.

A large body is read by another process, a model that another one serves is replaced, the precise
index is asked, and a request waits while no pod has room. Most requests need none of this.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from time import perf_counter
from typing import Final

from tandem_contract.prompt_length import ANY_VOCABULARY
from tandem_contract.request_kinds import RequestKind

from ..backends.precise import PrecisePrefixes
from ..exchange import HttpRequest
from ..flow.control import FlowController
from ..metrics.faults import Faults
from ..prefix.kv_events.collector import PreciseMatch
from ..request.bodies import CONTENT_TYPE, is_form, kind_of, named_model
from ..request.body_fields import BadBody
from ..request.body_worker import Reading
from ..request.large_bodies import LARGE, LargeBodies
from ..request.model_rewrites import ModelRewrites, Rewrite
from .preparation import Preparation, parse

_FRESH_SECONDS: Final = 1.0
"""Seconds for which a match of KV events counts as it is. Longer: a request that waited is not sent
where its prompt was placed meanwhile."""


class Preparer:
    """Prepares requests for the pick."""

    def __init__(
        self,
        precise: PrecisePrefixes,
        rewrites: ModelRewrites,
        faults: Faults,
        flow: FlowController,
        placed_body: Callable[[HttpRequest, bytes], bytes] = lambda _, body: body,
    ) -> None:
        """`placed_body`: the body as the pick will place it."""
        self._placed_body, self._flow = placed_body, flow
        self._precise, self._rewrites, self._faults = precise, rewrites, faults
        self._large_bodies = LargeBodies()

    def prepare(
        self, request: HttpRequest, body: bytes
    ) -> AbstractAsyncContextManager[object] | None:
        """What is known of a request's prompt before the pick. None: the pick waits for nothing."""
        is_prepared = self._precise.is_on or len(body) >= LARGE
        if not is_prepared and not self._may_wait(request, body):
            return None
        return self._prepare(request, self._placed_body(request, body))

    def _may_wait(self, request: HttpRequest, body: bytes) -> bool:
        """Whether flow control may hold the request."""
        if not self._flow.is_on or kind_of(request) is None:
            return False
        if self._rewrites.may_apply(request):
            # Its model is known only then.
            return True
        try:
            model = named_model(request, body) if self._flow.needs_model else None
        except BadBody:
            return False
        return self._flow.must_wait(model, len(body), request.subset)

    async def close(self) -> None:
        """End the process that reads large bodies."""
        await self._large_bodies.close()

    @asynccontextmanager
    async def _prepare(self, request: HttpRequest, body: bytes) -> AsyncIterator[object]:
        began = perf_counter()
        reading, parsed, rewrite = None, None, None
        with self._faults.contained("prepare"):
            if len(body) >= LARGE:
                form_type = request.headers[CONTENT_TYPE] if is_form(request) else ""
                reading = await self._large_bodies.read(kind_of(request), body, form_type)
                parsed = reading.request()
            if (rewrite := self._rewrite(request, reading, body)) is not None:
                body = rewrite.body
                if parsed is not None:
                    # Its prefix was hashed under the first name.
                    parsed.model = rewrite.target
        precise = None
        if reading is None or reading.refusal is None:
            precise = await self._match_precisely(request, body)
        # Only of a large body is the text known.
        sizes = ANY_VOCABULARY if parsed is None else self._precise.sizes(parsed.model)
        prepared = Preparation(reading, parsed, precise, rewrite, began, sizes)
        if not self._flow.is_on:
            yield prepared
            return
        if parsed is None and reading is None:
            # A bad body waits for nothing: the pick refuses it.
            with suppress(BadBody):
                parsed = parse(request, body)
        task = self._flow.enter(request, parsed, len(body))
        if task is None:
            yield replace(prepared, parsed=parsed)
            return
        # The caller has the body, and it alone counts among the bytes that are held: what follows
        # from it is made again when the request goes.
        body, parsed = b"", None
        async with self._flow.turn(task) as turn:
            # What the decision takes does not include the wait.
            began += turn.seconds
            if precise is not None and turn.seconds > _FRESH_SECONDS:
                precise = precise.aged()
            yield replace(
                prepared,
                precise=precise,
                began=began,
                held=turn.seconds,
                subset=turn.subset,
                refusal=turn.refusal,
            )

    def _rewrite(
        self, request: HttpRequest, reading: Reading | None, body: bytes
    ) -> Rewrite | None:
        if not self._rewrites.may_apply(request):
            return None
        try:
            model = reading.model if reading is not None else named_model(request, body)
            place = reading.form_model if reading is not None else None
            return self._rewrites.rewrite(request, model, body, place)
        except BadBody:
            # The pick refuses it, with the same message.
            return None

    async def _match_precisely(self, request: HttpRequest, body: bytes) -> PreciseMatch | None:
        """Raises nothing."""
        with self._faults.contained("prepare"):
            kind = kind_of(request) if self._precise.is_on else None
            if isinstance(kind, RequestKind):
                return await self._precise.prepare(kind, body)
        # The request is placed approximately, or has no prefix that is cached.
        return None
