"""Finds out about a body what takes time or must wait, before the pick: `Preparation`.

A large body is read by another process, a model that another one serves is replaced, and the
precise index is asked. Most requests need none of this.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from time import perf_counter

from tandem_contract.prompt_length import ANY_VOCABULARY
from tandem_contract.request_kinds import RequestKind

from ..backends.precise import PrecisePrefixes
from ..exchange import HttpRequest
from ..metrics.faults import Faults
from ..prefix.kv_events.collector import PreciseMatch
from ..request.bodies import CONTENT_TYPE, is_form, kind_of, named_model
from ..request.body_fields import BadBody
from ..request.body_worker import Reading
from ..request.large_bodies import LARGE, LargeBodies
from ..request.model_rewrites import ModelRewrites, Rewrite
from .preparation import Preparation


class Preparer:
    """Prepares requests for the pick."""

    def __init__(
        self,
        precise: PrecisePrefixes,
        rewrites: ModelRewrites,
        faults: Faults,
        salted: Callable[[HttpRequest, bytes], bytes] = lambda _, body: body,
    ) -> None:
        """`salted`: the body with the salt of its tenant."""
        self._salted = salted
        self._precise, self._rewrites, self._faults = precise, rewrites, faults
        self._large_bodies = LargeBodies()

    def prepare(
        self, request: HttpRequest, body: bytes
    ) -> AbstractAsyncContextManager[object] | None:
        """What is known of a request's prompt before the pick. None: the pick waits for nothing."""
        if not self._precise.is_on and len(body) < LARGE:
            return None
        return self._prepare(request, self._salted(request, body))

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
        yield Preparation(reading, parsed, precise, rewrite, began, sizes)

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
