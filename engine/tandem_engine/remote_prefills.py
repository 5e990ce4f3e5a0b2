"""The decode leg's side of hand-offs: leases kept while queued, pulls, releases.

    queued ──keep_alive──► begin ──► pull ends whole            the producer frees by itself
       │                        └──► fails or is cancelled ──►  release
       └──► not needed, refused, aborted ────────────────────►  release

Every request given to `begin` is reported to `ended` exactly once, when nobody writes into its
blocks any more.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tandem_contract.prefix import prompt_hash
from tandem_contract.transfer_params import TransferParams

from .step import Sequence
from .transfer.puller import LeaseRenewal, Puller
from .types import KvBroken, KvLoadError, PullResult

_log = logging.getLogger(__name__)

OnPullEnd = Callable[[Sequence, PullResult | KvLoadError | None], None]
"""Called with what came of a sequence's pull; None: it was cancelled."""


def unusable_reason(
    params: TransferParams, prompt_token_ids: tuple[int, ...], block_size: int
) -> str | None:
    """Why a prompt can not be answered from this remote KV; None when it can.

    Another length or hash means another prompt (a differing template, a batch): never read it.
    """
    theirs, prompt_tokens = params.remote_num_tokens, len(prompt_token_ids)
    if theirs is not None and theirs != prompt_tokens:
        return f"remote_num_tokens is {theirs}, the prompt has {prompt_tokens} tokens"
    blocks = len(params.remote_block_ids[0])
    if blocks * block_size < prompt_tokens:
        return f"remote_block_ids names {blocks} blocks, the prompt has {prompt_tokens} tokens"
    if params.tandem_prompt_hash not in (None, prompt_hash(prompt_token_ids)):
        return "tandem_prompt_hash is another's: the KV is of a prompt with other tokens"
    return None


@dataclass(slots=True)
class RemotePrefills:
    """All of one engine's pulls; for its event loop."""

    puller: Puller
    on_end: OnPullEnd
    _leases: dict[str, LeaseRenewal] = field(default_factory=dict)
    _running: dict[str, asyncio.Task[PullResult]] = field(default_factory=dict)
    _releases: set[asyncio.Task[None]] = field(default_factory=set)

    def renew_lease(self, request_id: str, params: TransferParams) -> None:
        """Renew the lease until the request is begun or dropped."""
        self._leases[request_id] = self.puller.renew_lease(params)

    def start(self, seq: Sequence, blocks: tuple[int, ...], skip: int) -> None:
        """Start pulling the whole prompt's KV into `blocks`, but for the first `skip`."""
        params = seq.transfer_params
        if params is None:
            raise ValueError(f"{seq.id} has no remote KV")
        self._stop_renewing(seq.id)
        task = asyncio.create_task(self.puller.pull(params, blocks, skip, seq.prompt_tokens))
        self._running[seq.id] = task
        task.add_done_callback(partial(self._finish, seq, params))

    def cancel(self, request_id: str) -> None:
        """Break a pull off; `ended` follows."""
        self._running[request_id].cancel()

    def release(self, request_id: str, params: TransferParams) -> None:
        """The request does not need its remote KV, and was not begun."""
        self._stop_renewing(request_id)
        task = asyncio.create_task(self.puller.release(params))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def close(self) -> None:
        """Break every pull off; returns once all have ended and every release was sent."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        while self._running or self._releases:
            await asyncio.gather(*self._releases)
            await asyncio.sleep(0)
        await self.puller.close()

    def _stop_renewing(self, request_id: str) -> None:
        if (lease := self._leases.pop(request_id, None)) is not None:
            lease.cancel()

    def _finish(
        self, seq: Sequence, params: TransferParams, task: asyncio.Task[PullResult]
    ) -> None:
        del self._running[seq.id]
        outcome: PullResult | KvLoadError | None
        if task.cancelled():
            outcome = None
        elif (err := task.exception()) is None:
            outcome = task.result()
        elif isinstance(err, KvLoadError):
            outcome = err
        else:
            _log.error("the pull for %s", seq.id, exc_info=err)
            outcome = KvBroken(f"internal error: {err}")
        if not isinstance(outcome, PullResult):
            self.release(seq.id, params)
        self.on_end(seq, outcome)
