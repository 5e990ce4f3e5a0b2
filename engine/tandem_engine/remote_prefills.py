"""The decode leg's side of hand-offs: lease renewals while queued, pulls, releases, failures.

    queued ──lease renewed──► start ──► pull succeeds             the producer frees by itself
       │                          └───► fails or is cancelled ──► release
       └──► not needed, refused or aborted ─────────────────────► release

Each sequence whose pull was started is reported to `on_end` exactly once, when no thread writes
into its blocks any more.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from tandem_contract.prefix import prompt_hash
from tandem_contract.transfer_params import TransferParams

from .blocks import BlockManager
from .observer import EngineObserver
from .scheduler import Step
from .step import Phase, Sequence
from .transfer.puller import LeaseRenewal, Puller
from .types import (
    Delta,
    KvBroken,
    KvLoadError,
    KvRefused,
    LoadFailurePolicy,
    PromptContradictsKv,
    PullResult,
)

_log = logging.getLogger(__name__)

OnPullEnd = Callable[[Sequence, PullResult | Delta | None], None]
"""Called with a sequence and the outcome of its pull: the result; the request's last delta when the
pull failed under policy `fail`; None when the prompt is to be computed here, or was aborted."""


def check_same_prompt(params: TransferParams, prompt_token_ids: tuple[int, ...]) -> None:
    """Raise PromptContradictsKv if this remote KV is of a prompt of another length or hash.

    The prefill engine computed another prompt: a client sent another one to this engine, or chat
    templates differ. An answer to either of the two could be the wrong one.
    """
    # Of a stream nothing is known yet: the producer compares the prompts' hashes.
    if params.is_stream:
        return
    remote_tokens, prompt_tokens = params.remote_num_tokens, len(prompt_token_ids)
    # Fields that older or other producers do not send are not compared.
    if remote_tokens is not None and remote_tokens != prompt_tokens:
        difference = f"remote_num_tokens is {remote_tokens}, the prompt has {prompt_tokens} tokens"
    elif params.tandem_prompt_hash not in (None, prompt_hash(prompt_token_ids)):
        difference = "tandem_prompt_hash differs: the KV is of a prompt with other tokens"
    else:
        return
    raise PromptContradictsKv(f"{difference}. Send the prompt that the prefill engine was sent")


class RemotePrefills:
    """The prompts whose KV this engine pulls from prefill engines. For the engine's event loop."""

    def __init__(
        self,
        policy: LoadFailurePolicy,
        puller: Puller,
        blocks: BlockManager,
        observer: EngineObserver,
        on_end: OnPullEnd,
    ) -> None:
        self._policy = policy
        self._puller = puller
        self._blocks = blocks
        self._observer = observer
        self._on_end = on_end
        # Queued since the last step: their leases are not renewed yet.
        self._new: list[Sequence] = []
        self._leases: dict[str, LeaseRenewal] = {}
        self._pulls: dict[str, asyncio.Task[PullResult]] = {}
        # Tasks that no caller awaits: `close` waits for them, so that every release is sent.
        self._releases: set[asyncio.Task[None]] = set()

    def add(self, seq: Sequence) -> Delta | None:
        """Take in a queued sequence that has KV to pull.

        KV that has too few blocks for its prompt is released, and the load counts as failed;
        returns the request's last delta then when the policy is `fail`. Raises PromptContradictsKv
        for the KV of another prompt, which the caller releases.
        """
        params = seq.transfer_params
        if params is None:
            return None
        prompt = seq.request.prompt_token_ids
        check_same_prompt(params, prompt)
        blocks = len(params.remote_block_ids[0]) if not params.is_stream else 0
        # Not pulled yet: it waits for blocks, which `apply` reports in `step.pulls`.
        if params.is_stream or blocks * self._blocks.block_size >= len(prompt):
            if params.is_stream:
                seq.transfer_params = replace(params, tandem_prompt_hash=prompt_hash(prompt))
            self._new.append(seq)
            return None
        self.release(seq.id, params)
        seq.transfer_params = None
        reason = f"remote_block_ids names {blocks} blocks, the prompt has {len(prompt)} tokens"
        return self._handle_failure(seq, KvRefused(reason))

    def apply(self, step: Step) -> None:
        """Start the pulls of a planned step, release the KV it does not need, renew leases."""
        for seq in step.pulls:
            self._start(seq)
        for seq, params in step.unneeded_transfers:
            self.release(seq.id, params)
        # Only now: most requests are pulled in the step after their arrival and need no renewal.
        # The others wait for blocks, and their lease must not end meanwhile.
        for seq in self._new:
            if seq.phase is Phase.WAITING and seq.transfer_params is not None:
                self._leases[seq.id] = self._puller.renew_lease(seq.transfer_params)
        self._new.clear()

    def cancel(self, request_id: str) -> None:
        """Break a pull off; `on_end` follows."""
        self._pulls[request_id].cancel()

    def release(self, request_id: str, params: TransferParams) -> None:
        """Have the producer free KV that will not be read, in a task of its own."""
        if (lease := self._leases.pop(request_id, None)) is not None:
            lease.cancel()
        task = asyncio.create_task(self._puller.release(params))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def release_now(self, params: TransferParams) -> None:
        """Have the producer free KV that no queued sequence needs; returns when it was told."""
        await self._puller.release(params)

    async def close(self) -> None:
        """Break every pull off; returns once all have ended and every release was sent."""
        pulls = list(self._pulls.values())
        for pull in pulls:
            pull.cancel()
        await asyncio.gather(*pulls, return_exceptions=True)
        # A pull that ends queues its callback, and the callback may start a release.
        while self._pulls or self._releases:
            await asyncio.gather(*self._releases)
            # Lets the done callbacks of ended pulls run, which start further releases.
            await asyncio.sleep(0)
        await self._puller.close()

    def _start(self, seq: Sequence) -> None:
        """Pull the whole prompt's KV into the sequence's blocks, except the cached ones."""
        params = seq.transfer_params
        if params is None:
            raise ValueError(f"{seq.id} has no remote KV")
        # From here on the producer renews the lease with every byte that it sends.
        if (lease := self._leases.pop(seq.id, None)) is not None:
            lease.cancel()
        # Fixed until the pull ends: a loading sequence is neither extended nor preempted.
        blocks = self._blocks.table(seq.id)
        cached_blocks = seq.computed_tokens // self._blocks.block_size
        pull = self._puller.pull(params, blocks, cached_blocks, seq.prompt_tokens)
        self._pulls[seq.id] = task = asyncio.create_task(pull)
        task.add_done_callback(partial(self._finish, seq, params))

    def _finish(
        self, seq: Sequence, params: TransferParams, task: asyncio.Task[PullResult]
    ) -> None:
        # The task has ended, so no thread writes into the blocks: `on_end` may free them.
        del self._pulls[seq.id]
        if not task.cancelled() and (err := task.exception()) is None:
            self._on_end(seq, task.result())
            return
        self.release(seq.id, params)
        if task.cancelled():
            self._on_end(seq, None)
            return
        # A bug must fail only this request: an exception in a callback would leave it waiting.
        if not isinstance(err, KvLoadError):
            _log.error("the pull for %s failed with an internal error", seq.id, exc_info=err)
            err = KvBroken(f"internal error: {err}")
        # An aborted request has its last delta already and is no failed load.
        self._on_end(seq, None if seq.aborted else self._handle_failure(seq, err))

    def _handle_failure(self, seq: Sequence, err: KvLoadError) -> Delta | None:
        """Count the failure. Returns the last delta under policy `fail`, None under `recompute`."""
        # Failures before the pull (KV of another prompt) count, too.
        self._observer.record_pull_failure()
        self._observer.record_external_lookup(seq.uncached_tokens, 0)
        if self._policy is LoadFailurePolicy.RECOMPUTE:
            _log.warning("%s: remote KV not loaded, recomputing: %s", seq.id, err)
            return None
        _log.warning("%s: remote KV not loaded: %s", seq.id, err)
        return Delta(finish_reason="error", error=f"remote KV could not be loaded: {err}")
