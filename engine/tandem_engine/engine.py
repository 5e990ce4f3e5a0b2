"""The engine's loop: queue → plan a step → run it in the worker thread → deliver its tokens.

    submit ──► scheduler ──Step──► runner (one thread) ──SampledToken──► Generation
                  ▲   │ loads                  │ computed            (last delta)
            ended │   ▼                        ▼
                 pulls ◄──── KV over TCP ──── holds (holds under a lease)

All bookkeeping is the event loop's; the thread sees only a step's frozen chunks. Blocks of a
sequence that is in the running step, or being pulled into, are freed when that has ended;
everything else is freed at once.

Errors: `RequestRejected` from `submit`; a failing step ends every request with finish_reason
`error` and makes the engine unhealthy.
"""

import asyncio
import logging
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from tandem_contract.timing import Timing
from tandem_contract.transfer_params import TransferParams

from .admission import RequestLimits
from .blocks import BlockManager
from .config import EngineConfig
from .generation import Generation
from .observer import EngineObserver, Stats
from .prompt_holds import PromptHolds
from .remote_prefills import RemotePrefills, unusable_reason
from .runner import Runner
from .scheduler import Scheduler, Step
from .step import Chunk, Phase, SampledToken, Sequence
from .transfer.puller import Puller
from .types import (
    Delta,
    KvLoadError,
    KvRefused,
    LoadFailurePolicy,
    PullResult,
    RemoteDecode,
    Request,
    RequestRejected,
)

__all__ = ["Engine", "EngineObserver", "Generation", "Stats"]

_log = logging.getLogger(__name__)


class Engine:
    """One model, one cache, one loop. `start` it first; `stop` leaves nothing behind."""

    limits: RequestLimits
    """What requests may not exceed; known once started."""
    _runner: Runner
    _blocks: BlockManager
    _scheduler: Scheduler

    def __init__(self, config: EngineConfig, observer: EngineObserver) -> None:
        self.config = config
        self._observer = observer
        self._random = random.Random(config.seed)
        self._worker = ThreadPoolExecutor(1, "engine-step")
        self._wake = asyncio.Event()
        self._hold_released = asyncio.Event()
        self._generations: dict[str, Generation] = {}
        self._sequences: dict[str, Sequence] = {}
        self._step_sequences: frozenset[Sequence] = frozenset()
        self._unrenewed: list[Sequence] = []
        self._order = 0
        self._stop_reason: str | None = "the engine has not started"
        self._prompt_holds: PromptHolds | None = None
        self._remote_prefills: RemotePrefills | None = None
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the model and start the loop.

        Raises ModelError, ConfigError, also when the side channel's address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        try:
            self._runner = await loop.run_in_executor(self._worker, Runner, self.config)
            self._build(self._runner)
            if self._prompt_holds is not None:
                await self._prompt_holds.start()
        except BaseException:
            self._worker.shutdown()
            raise
        self._stop_reason = None
        self._loop = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Abort what runs, free what is held, end the threads. Harmless when never started."""
        self._stop_reason = self._stop_reason or "the engine is shutting down"
        for request_id in list(self._sequences):
            self.abort(request_id)
        self._wake.set()
        if self._loop is not None:
            await self._loop
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
        """Where readers of this engine's KV connect; None when it produces none."""
        return self._prompt_holds.address if self._prompt_holds is not None else None

    def stats(self) -> Stats:
        """The gauges of this moment."""
        return Stats(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting + self._scheduler.loading,
            waiting_for_kv=self._scheduler.loading,
            kv_usage=self._blocks.usage,
            free_blocks=self._blocks.free_count,
            num_blocks=self._blocks.num_blocks,
            held_requests=self._blocks.hold_count,
        )

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False, and nothing done, while any block is in use."""
        return self._blocks.reset_prefix_cache()

    def submit(self, request: Request) -> Generation:
        """Start a request. Raises RequestRejected when it can never run here."""
        generation = Generation(request.request_id, self.abort)
        if self._stop_reason is not None:
            generation.put(Delta(finish_reason="error", error=self._stop_reason))
            return generation
        self.limits.check(request)
        if request.request_id in self._sequences or self._blocks.is_held(request.request_id):
            raise RequestRejected(f"request id {request.request_id!r} is in use")
        seq = self._new_sequence(request)
        if (error := self._check_remote_kv(seq)) is not None:
            generation.put(error)
            return generation
        if self._prompt_holds is not None and seq.is_remote_decode:
            self._prompt_holds.open(seq)
        if seq.transfer_params is not None:
            self._unrenewed.append(seq)
        self._generations[seq.id] = generation
        self._sequences[seq.id] = seq
        self._scheduler.add(seq)
        self._wake.set()
        return generation

    def abort(self, request_id: str) -> None:
        """End a request and free its blocks; unknown, ended and held ones are left alone."""
        seq = self._sequences.get(request_id)
        if seq is not None and not seq.aborted:
            self._end(seq, Delta(finish_reason="abort"))

    def release_hold(self, request_id: str) -> None:
        """Free a finished prompt's KV that no reader was told of; any other is left alone."""
        if self._prompt_holds is not None:
            self._prompt_holds.release(request_id)

    async def wait_until_unheld(self) -> None:
        """Return once no finished prompt's KV waits for a reader."""
        while self._blocks.hold_count:
            self._hold_released.clear()
            await self._hold_released.wait()

    async def release_remote_hold(self, params: TransferParams) -> None:
        """Tell the producer that nobody will read; for a request refused before `submit`."""
        if self._remote_prefills is not None:
            await self._remote_prefills.puller.release(params)

    def _build(self, runner: Runner) -> None:
        config, cache = self.config, runner.cache
        self._blocks = BlockManager(
            cache.num_blocks, config.block_size, self._observer.record_kv_event
        )
        self._scheduler = Scheduler(
            self._blocks, max_seqs=config.max_num_seqs, max_tokens=config.max_num_batched_tokens
        )
        self.limits = RequestLimits(
            runner.max_model_len,
            runner.model_config.vocab_size,
            cache.num_blocks,
            config.block_size,
        )
        if (transfer := config.kv_transfer) is None:
            return
        if transfer.role.produces:
            self._prompt_holds = PromptHolds(
                transfer, cache, self._blocks, self._observer, self._on_hold_end
            )
        if transfer.role.consumes:
            self._remote_prefills = RemotePrefills(
                Puller(cache.layers, cache.layout), self._on_pull_end
            )

    def _on_hold_end(self) -> None:
        self._wake.set()
        self._hold_released.set()

    def _new_sequence(self, request: Request) -> Sequence:
        """Without the matching role a hand-off is ignored and the request served whole."""
        able = self._prompt_holds if isinstance(request.kv, RemoteDecode) else self._remote_prefills
        if able is None:
            request = replace(request, kv=None)
        sampling, eos = request.sampling, self._runner.model_config.eos_token_ids
        stops = frozenset(sampling.stop_token_ids + (() if sampling.ignore_eos else eos))
        self._order += 1
        return Sequence(
            request=request,
            order=self._order,
            seed=self._random.getrandbits(63) if sampling.seed is None else sampling.seed,
            stops=frozenset() if isinstance(request.kv, RemoteDecode) else stops,
            arrival_time=time.perf_counter(),
            transfer_params=request.kv if isinstance(request.kv, TransferParams) else None,
        )

    def _check_remote_kv(self, seq: Sequence) -> Delta | None:
        """Let go of remote KV that is not this prompt's; the error when policy says fail."""
        if seq.transfer_params is None or self._remote_prefills is None:
            return None
        why = unusable_reason(
            seq.transfer_params, seq.request.prompt_token_ids, self.config.block_size
        )
        if why is None:
            return None
        self._remote_prefills.release(seq.id, seq.transfer_params)
        seq.transfer_params = None
        return self._handle_load_failure(seq, KvRefused(why))

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._stop_reason is None:
                self._wake.clear()
                step = self._scheduler.schedule()
                self._prepare_step(step)
                if not step.chunks:
                    await self._wake.wait()
                    continue
                early = (
                    self._prompt_holds.layer_publisher(step.chunks)
                    if self._prompt_holds is not None
                    else None
                )
                run = partial(self._runner.run, step.chunks, early)
                results = await loop.run_in_executor(self._worker, run)
                self._step_sequences = frozenset()
                for chunk, sampled in zip(step.chunks, results, strict=True):
                    self._advance(chunk, sampled)
        except Exception:  # noqa: BLE001 - the loop's top: every request must learn of it
            _log.exception("a step failed: the engine is stopping")
            self._stop_reason = "the engine failed in a step: see its log, and restart it"
            self._step_sequences = frozenset()
            for seq in list(self._sequences.values()):
                self._end(seq, Delta(finish_reason="error", error=self._stop_reason))

    def _prepare_step(self, step: Step) -> None:
        """Everything that a planned step brings with it, before it runs."""
        now = time.perf_counter()
        self._step_sequences = frozenset(chunk.sequence for chunk in step.chunks)
        for seq in self._step_sequences:
            seq.start_time = seq.start_time or now
        for seq in step.preempted:
            self._observer.record_preemption()
            if self._prompt_holds is not None and seq.is_remote_decode:
                self._prompt_holds.reopen(seq)
        for seq in step.admitted:
            self._observer.record_prefix_lookup(seq.prompt_tokens, seq.cached_tokens)
        if self._remote_prefills is not None:
            self._start_pulls(step, self._remote_prefills)

    def _start_pulls(self, step: Step, remote_prefills: RemotePrefills) -> None:
        for seq in step.pulls:
            remote_prefills.start(
                seq, self._blocks.table(seq.id), seq.computed_tokens // self.config.block_size
            )
        for seq, params in step.unneeded_transfers:
            remote_prefills.release(seq.id, params)
        for seq in self._unrenewed:
            if seq.phase is Phase.WAITING and seq.transfer_params is not None:
                remote_prefills.renew_lease(seq.id, seq.transfer_params)
        self._unrenewed.clear()

    def _advance(self, chunk: Chunk, sampled: SampledToken | None) -> None:
        seq = chunk.sequence
        if seq.aborted:
            self._remove(seq)
            return
        self._scheduler.advance(chunk, sampled.token if sampled is not None else None)
        if self._prompt_holds is not None and seq.is_remote_decode:
            self._prompt_holds.publish(chunk)
        if sampled is not None:
            self._observer.record_generated_tokens(1)
            self._deliver(seq, sampled)

    def _deliver(self, seq: Sequence, sampled: SampledToken) -> None:
        stopped = sampled.token in seq.stops
        is_last = stopped or seq.generated_tokens >= seq.max_tokens
        holds = self._prompt_holds if seq.is_remote_decode else None
        delta = Delta(
            token_ids=(sampled.token,),
            logprobs=(sampled.logprobs,) if sampled.logprobs is not None else (),
            finish_reason=("stop" if stopped else "length") if is_last else None,
            stop_token=sampled.token if stopped else None,
            timing=self._record_first_token(seq) if seq.generated_tokens == 1 else None,
            kv_transfer_params=holds.transfer_params(seq) if holds is not None else None,
        )
        self._generations[seq.id].put(delta)
        if is_last:
            self._remove(seq, hold=holds is not None)

    def _record_first_token(self, seq: Sequence) -> Timing:
        """The token that is computed again after a pull counts as pulled, as in vLLM."""
        started, pulled = seq.start_time or seq.arrival_time, seq.pull
        seconds = pulled.seconds if pulled is not None else 0.0
        external = pulled.tokens if pulled is not None else 0
        computed = max(0, seq.prompt_tokens - seq.cached_tokens - external)
        self._observer.record_prompt(computed, seq.cached_tokens, external)
        return Timing(
            queue=max(0.0, started - seq.arrival_time - seconds),
            compute=time.perf_counter() - started,
            cached=seq.cached_tokens,
            computed=computed,
            transfer=seconds if pulled is not None else None,
            bytes=pulled.bytes if pulled is not None else None,
        )

    def _end(self, seq: Sequence, last: Delta) -> None:
        """The last delta goes out now, the blocks go back as soon as nobody writes to them."""
        seq.aborted = True
        self._generations[seq.id].put(last)
        if seq.phase is Phase.LOADING and self._remote_prefills is not None:
            self._remote_prefills.cancel(seq.id)
        elif seq not in self._step_sequences:
            self._remove(seq)

    def _remove(self, seq: Sequence, *, hold: bool = False) -> None:
        if (
            self._remote_prefills is not None
            and seq.transfer_params is not None
            and seq.phase is Phase.WAITING
        ):
            self._remote_prefills.release(seq.id, seq.transfer_params)
        del self._sequences[seq.id], self._generations[seq.id]
        self._scheduler.remove(seq, hold=hold)
        if self._prompt_holds is not None and seq.is_remote_decode:
            (self._prompt_holds.hold if hold else self._prompt_holds.discard)(seq)
        self._wake.set()

    def _on_pull_end(self, seq: Sequence, outcome: PullResult | KvLoadError | None) -> None:
        if seq.aborted or outcome is None:
            self._remove(seq)
            return
        if isinstance(outcome, PullResult):
            seq.pull = outcome
            self._observer.record_pull(outcome)
            self._observer.record_external_lookup(
                seq.prompt_tokens - seq.cached_tokens, outcome.tokens
            )
            self._scheduler.finish_pull(seq, seq.prompt_tokens - 1)
        elif (error := self._handle_load_failure(seq, outcome)) is None:
            self._scheduler.finish_pull(seq, seq.computed_tokens)
        else:
            self._generations[seq.id].put(error)
            self._remove(seq)
        self._wake.set()

    def _handle_load_failure(self, seq: Sequence, err: KvLoadError) -> Delta | None:
        """Count it; the request's end when the policy is fail, None when it is recompute."""
        self._observer.record_pull_failure()
        self._observer.record_external_lookup(seq.prompt_tokens - seq.cached_tokens, 0)
        transfer = self.config.kv_transfer
        if transfer is not None and transfer.policy is LoadFailurePolicy.RECOMPUTE:
            _log.warning("%s: remote KV not loaded, recomputing: %s", seq.id, err)
            return None
        _log.warning("%s: remote KV not loaded: %s", seq.id, err)
        return Delta(finish_reason="error", error=f"remote KV could not be loaded: {err}")
