"""The engine's loop: schedule a step, run it in the worker thread, deliver its tokens.

    submit ──► scheduler ──Step──► runner (one thread) ──SampledToken──► Generation
                  ▲   │ pulls                │ KV of a chunk computed    (last Delta)
         pull ends│   ▼                      ▼
            remote_prefills ◄── KV, TCP ── prompt_holds (KvHolds under a lease)

All bookkeeping belongs to the event loop; the worker thread reads only a step's frozen chunks. The
blocks of a sequence in the running step, or of one that a pull writes into, are freed when that
step or pull has ended; all other blocks are freed at once.

Errors: `RequestRejected` from `submit`. When a step fails, every request ends with finish_reason
`error` and the engine is unhealthy until it is restarted.
"""

import asyncio
import logging
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tandem_contract.timing import Timing
from tandem_contract.transfer_params import TransferParams

from .admission import RequestLimits
from .blocks import BlockManager
from .config import EngineConfig
from .generation import Generation
from .observer import EngineObserver, Stats, current_stats
from .prompt_holds import PromptHolds
from .remote_prefills import RemotePrefills
from .runner import Runner
from .scheduler import Scheduler, Step
from .step import Chunk, Phase, SampledToken, Sequence, new_sequence
from .step_runner import StepRunner
from .tiers.build import Tiers, open_tiers
from .tiers.no_tiers import NO_TIERS
from .transfer.puller import Puller
from .transfer.trust import Trust
from .types import Delta, PullResult, RemoteDecode, Request, RequestRejected

__all__ = ["Engine", "EngineObserver", "Generation", "Stats"]

_log = logging.getLogger(__name__)


class Engine:
    """One model, one KV cache, one loop. Call `start` first; `stop` ends every task and thread."""

    limits: RequestLimits
    """Limits that every request must keep; set by `start`."""
    _runner: Runner
    _blocks: BlockManager
    _scheduler: Scheduler
    _steps: StepRunner

    def __init__(self, config: EngineConfig, observer: EngineObserver) -> None:
        self.config = config
        self._observer = observer
        self._random = random.Random(config.seed)
        # One thread: steps never overlap, and only this thread writes computed KV to the cache.
        self._worker = ThreadPoolExecutor(1, "engine-step")
        self._wake = asyncio.Event()
        self._hold_released = asyncio.Event()
        self._generations: dict[str, Generation] = {}
        self._sequences: dict[str, Sequence] = {}
        # Sequences whose blocks the worker thread may be writing to: they must not be freed now.
        self._step_sequences: frozenset[Sequence] = frozenset()
        self._order = 0
        # None while requests are served; else the error that new requests end with.
        self._stop_reason: str | None = "the engine has not started"
        self._prompt_holds: PromptHolds | None = None
        self._remote_prefills: RemotePrefills | None = None
        self._tiers: Tiers = NO_TIERS
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the model and start the loop.

        Raises ModelError, or ConfigError, also when the side channel's address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        try:
            self._runner = await loop.run_in_executor(self._worker, Runner, self.config)
            await self._build(self._runner)
            if self._prompt_holds is not None:
                await self._prompt_holds.start()
        # On cancellation, too: the worker thread would outlive the failed start.
        except BaseException:
            self._worker.shutdown()
            raise
        self._stop_reason = None
        self._loop = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Abort every request, free every hold, end the threads. Harmless before `start`."""
        self._stop_reason = self._stop_reason or "the engine is shutting down"
        for request_id in list(self._sequences):
            self.abort(request_id)
        self._wake.set()
        if self._loop is not None:
            # Pulls write into blocks, and holds keep blocks: the loop must have ended before both.
            await self._loop
            await self._tiers.close()
            if self._remote_prefills is not None:
                await self._remote_prefills.close()
            if self._prompt_holds is not None:
                await self._prompt_holds.close()
        self._worker.shutdown()

    @property
    def healthy(self) -> bool:
        """Whether requests are served."""
        return self._stop_reason is None

    @property
    def side_channel(self) -> tuple[str, int] | None:
        """Address at which decode engines read this engine's KV; None without hand-offs."""
        return self._prompt_holds.address if self._prompt_holds is not None else None

    def stats(self) -> Stats:
        """The values of the gauges now."""
        return current_stats(self._scheduler, self._blocks)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. Returns False and does nothing while any block is in use."""
        return self._blocks.reset_prefix_cache()

    def submit(self, request: Request) -> Generation:
        """Queue a request. Raises RequestRejected when it can never run on this engine."""
        generation = Generation(request.request_id, self.abort)
        if self._stop_reason is not None:
            generation.put(Delta(finish_reason="error", error=self._stop_reason))
            return generation
        self.limits.check(request)
        # The id is the key of the blocks, also while they are held after the last token.
        if request.request_id in self._sequences or self._blocks.is_held(request.request_id):
            raise RequestRejected(f"request id {request.request_id!r} is in use")
        seq = self._new_sequence(request)
        remote = self._remote_prefills
        if remote is not None and (error := remote.add(seq)) is not None:
            generation.put(error)
            return generation
        if (holds := self._holds_for(seq)) is not None:
            # From here on a decode engine may connect and wait for this prefill.
            holds.open(seq)
        self._generations[seq.id] = generation
        self._sequences[seq.id] = seq
        self._scheduler.add(seq)
        self._wake.set()
        return generation

    def abort(self, request_id: str) -> None:
        """End a request and free its blocks. No effect on unknown, ended and held requests."""
        seq = self._sequences.get(request_id)
        if seq is not None and not seq.aborted:
            self._end(seq, Delta(finish_reason="abort"))

    def release_hold(self, request_id: str) -> None:
        """Free the KvHold of a finished prompt whose transfer parameters reached no client.

        No effect on any other request.
        """
        if self._prompt_holds is not None:
            self._prompt_holds.release(request_id)

    async def wait_until_unheld(self) -> None:
        """Return once no KvHold is left: each was read, released or expired."""
        while self._blocks.hold_count:
            self._hold_released.clear()
            await self._hold_released.wait()

    async def release_remote_hold(self, params: TransferParams) -> None:
        """Have the producer free its KvHold: this request was refused before `submit`."""
        if self._remote_prefills is not None:
            await self._remote_prefills.release_now(params)

    async def _build(self, runner: Runner) -> None:
        config, cache, observer = self.config, runner.cache, self._observer
        blocks = BlockManager(cache.num_blocks, config.block_size, observer.record_kv_event)
        self._blocks = blocks
        self._tiers = await open_tiers(
            *(config, runner, blocks, observer, self._on_load_end), wake=self._wake.set
        )
        self._scheduler = Scheduler(
            blocks,
            max_seqs=config.max_num_seqs,
            max_tokens=config.max_num_batched_tokens,
            max_chunk=config.long_prefill_token_threshold or config.max_num_batched_tokens,
            may_load=self._tiers.may_load,
        )
        sizes = (runner.model_config.vocab_size, cache.num_blocks, config.block_size)
        self.limits = RequestLimits(runner.max_model_len, *sizes)
        transfer = config.kv_transfer
        if transfer is not None:
            # In each role, as with vLLM's NixlConnector: engines that go on with the streams of a
            # decode engine that drains read their KV there.
            self._prompt_holds = PromptHolds(transfer, cache, blocks, observer, self._on_hold_end)
        self._steps = StepRunner(runner, self._worker, self._wake, self._tiers, self._prompt_holds)
        if transfer is not None and transfer.role.consumes:
            puller = Puller(cache.layers, cache.layout, trust=Trust(transfer.keys))
            self._remote_prefills = RemotePrefills(
                transfer.policy, puller, blocks, observer, self._on_pull_end
            )

    def _on_hold_end(self) -> None:
        # The blocks are free again: a queued request may fit now.
        self._wake.set()
        self._hold_released.set()

    def _holds_for(self, seq: Sequence) -> PromptHolds | None:
        """The holds when `seq` is a prefill whose KV a decode engine reads; else None."""
        return self._prompt_holds if seq.is_remote_decode else None

    def _new_sequence(self, request: Request) -> Sequence:
        """Without the role that its hand-off needs, a request is computed here as a whole."""
        kv = request.kv
        role = self._prompt_holds if isinstance(kv, RemoteDecode) else self._remote_prefills
        if role is None and isinstance(kv, RemoteDecode | TransferParams):
            request = replace(request, kv=None)
        self._order += 1
        eos = self._runner.model_config.eos_token_ids
        return new_sequence(request, self._order, self._random, eos)

    async def _run(self) -> None:
        try:
            while self._stop_reason is None:
                # Clear before scheduling: whatever changes after this line wakes the loop again.
                self._wake.clear()
                step = self._scheduler.schedule()
                self._prepare_step(step)
                if not step.chunks:
                    await self._wake.wait()
                    continue
                results = await self._steps.run(step)
                # The worker thread is idle now: from here on `_end` may free these blocks at once.
                self._step_sequences = frozenset()
                for i, chunk in enumerate(step.chunks):
                    self._advance(chunk, results[i] if results else None, is_cut=results is None)
        except Exception:  # noqa: BLE001 - the loop's top: every request must end
            _log.exception("a step failed: the engine is stopping")
            self._stop_reason = "the engine failed in a step: see its log, and restart it"
            self._step_sequences = frozenset()
            for seq in list(self._sequences.values()):
                self._end(seq, Delta(finish_reason="error", error=self._stop_reason))

    def _prepare_step(self, step: Step) -> None:
        """Apply what scheduling has changed, before the step runs."""
        now = time.perf_counter()
        self._step_sequences = frozenset(chunk.sequence for chunk in step.chunks)
        for seq in self._step_sequences - {step.arriving}:
            # Kept through preemption: the time in the queue is measured once.
            seq.start_time = seq.start_time or now
        for seq in step.preempted:
            self._observer.record_preemption()
            if (holds := self._holds_for(seq)) is not None:
                holds.reopen(seq)
        for seq in step.admitted:
            self._observer.record_prefix_lookup(seq.prompt_tokens, seq.cached_tokens)
        if self._remote_prefills is not None:
            self._remote_prefills.apply(step)
        self._tiers.apply(step)

    def _advance(self, chunk: Chunk, sampled: SampledToken | None, *, is_cut: bool) -> None:
        seq = chunk.sequence
        if seq.aborted:
            # `_end` has sent the last delta; only the blocks were left to be freed.
            if not self._tiers.is_loading(seq.id):
                self._remove(seq)
            return
        if is_cut or seq.computed_tokens != chunk.start:
            # Dropped: not all of the KV before it arrived. The end of the load queues it again.
            return
        self._scheduler.advance(chunk, sampled.token if sampled is not None else None)
        if (holds := self._holds_for(seq)) is not None:
            holds.publish(chunk)
        self._tiers.save(seq)
        if sampled is not None:
            self._observer.record_generated_tokens(1)
            self._deliver(seq, sampled)

    def _deliver(self, seq: Sequence, sampled: SampledToken) -> None:
        is_stop = sampled.token in seq.stops
        is_last = is_stop or seq.generated_tokens >= seq.max_tokens
        holds = self._holds_for(seq)
        # The parameters name the blocks, so they are read before `_remove` turns these into a hold.
        delta = Delta(
            token_ids=(sampled.token,),
            logprobs=(sampled.logprobs,) if sampled.logprobs is not None else (),
            finish_reason=("stop" if is_stop else "length") if is_last else None,
            stop_token=sampled.token if is_stop else None,
            timing=self._first_token_timing(seq) if seq.generated_tokens == 1 else None,
            kv_transfer_params=holds.transfer_params(seq) if holds is not None else None,
        )
        self._tiers.deliver(seq, delta, self._generations[seq.id].put)
        if is_last:
            self._remove(seq, hold=holds is not None)

    def _first_token_timing(self, seq: Sequence) -> Timing:
        self._observer.record_prompt(seq.local_tokens, seq.cached_tokens, seq.pulled_tokens)
        return seq.first_token_timing(time.perf_counter())

    def _end(self, seq: Sequence, last: Delta) -> None:
        """Send the last delta now; free the blocks as soon as no step or pull writes to them."""
        seq.aborted = True
        self._generations[seq.id].put(last)
        if self._tiers.is_loading(seq.id):
            self._tiers.cancel(seq.id)
        elif seq.phase is Phase.LOADING and self._remote_prefills is not None:
            self._remote_prefills.cancel(seq.id)
        elif seq not in self._step_sequences:
            self._remove(seq)
        # Otherwise `_on_pull_end`, or `_advance` after the step, removes it.

    def _remove(self, seq: Sequence, *, hold: bool = False) -> None:
        """Forget a sequence; its blocks are freed, or with `hold` kept for a reader."""
        remote, params = self._remote_prefills, seq.transfer_params
        if remote is not None and params is not None and seq.phase is Phase.WAITING:
            # Aborted in the queue: its KV was never pulled, and the producer still holds it.
            remote.release(seq.id, params)
        del self._sequences[seq.id], self._generations[seq.id]
        # The blocks are held before the lease starts: a lease can end at once and free them.
        self._scheduler.remove(seq, hold=hold)
        if (holds := self._holds_for(seq)) is not None:
            (holds.hold if hold else holds.discard)(seq)
        self._wake.set()

    def _on_pull_end(self, seq: Sequence, outcome: PullResult | Delta | None) -> None:
        if seq.aborted:
            self._remove(seq)
        elif isinstance(outcome, Delta):
            self._generations[seq.id].put(outcome)
            self._remove(seq)
        # Failed under policy `recompute`: what is neither cached nor in a tier is computed here.
        elif outcome is None:
            if not self._tiers.load(seq):
                self._scheduler.finish_loading(seq, seq.computed_tokens)
        else:
            seq.pull = outcome
            self._observer.record_pull(outcome)
            self._observer.record_external_lookup(seq.uncached_tokens, outcome.tokens)
            # The last prompt token is computed here: its logits choose the first new token.
            self._scheduler.finish_loading(seq, seq.prompt_tokens - 1)
        self._wake.set()

    def _on_load_end(self, seq: Sequence, computed: int) -> None:
        if not seq.aborted:
            self._scheduler.finish_loading(seq, computed)
        # A step on arriving KV may write to its blocks: `_advance` removes it then.
        elif seq not in self._step_sequences:
            self._remove(seq)
        self._wake.set()
