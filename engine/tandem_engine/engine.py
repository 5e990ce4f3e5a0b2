"""The engine's loop: queue → plan a step → run it in the worker thread → deliver its tokens.

    submit ──► scheduler ──Step──► runner (one thread) ──Sampled──► Generation
                  ▲   │ loads                  │ computed            (last delta)
            ended │   ▼                        ▼
                 pulls ◄──── KV over TCP ──── kept (holds under a lease)

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

from .admission import Limits
from .blocks import BlockManager
from .config import EngineConfig
from .generation import Generation
from .kept import KeptPrompts
from .observer import EngineObserver, Stats
from .pulls import Pulls, refusal
from .runner import Runner
from .scheduler import Scheduler, Step
from .step import Chunk, Phase, Sampled, Sequence
from .transfer.puller import Puller
from .types import (
    Delta,
    KvLoadError,
    KvRefused,
    LoadFailurePolicy,
    Pulled,
    RemoteDecode,
    Request,
    RequestRejected,
)

__all__ = ["Engine", "EngineObserver", "Generation", "Stats"]

_log = logging.getLogger(__name__)


class Engine:
    """One model, one cache, one loop. `start` it first; `stop` leaves nothing behind."""

    limits: Limits
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
        self._hold_over = asyncio.Event()
        self._generations: dict[str, Generation] = {}
        self._sequences: dict[str, Sequence] = {}
        self._in_step: frozenset[Sequence] = frozenset()
        self._queued_remote: list[Sequence] = []
        self._order = 0
        self._stopped: str | None = "the engine has not started"
        self._kept: KeptPrompts | None = None
        self._pulls: Pulls | None = None
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the model and start the loop.

        Raises ModelError, ConfigError, also when the side channel's address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        try:
            self._runner = await loop.run_in_executor(self._worker, Runner, self.config)
            self._prepare(self._runner)
            if self._kept is not None:
                await self._kept.start()
        except BaseException:
            self._worker.shutdown()
            raise
        self._stopped = None
        self._loop = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Abort what runs, free what is held, end the threads. Harmless when never started."""
        self._stopped = self._stopped or "the engine is shutting down"
        for request_id in list(self._sequences):
            self.abort(request_id)
        self._wake.set()
        if self._loop is not None:
            await self._loop
            if self._pulls is not None:
                await self._pulls.close()
            if self._kept is not None:
                await self._kept.close()
        self._worker.shutdown()

    @property
    def healthy(self) -> bool:
        """Whether requests are served."""
        return self._stopped is None

    @property
    def side_channel(self) -> tuple[str, int] | None:
        """Where readers of this engine's KV connect; None when it produces none."""
        return self._kept.address if self._kept is not None else None

    def stats(self) -> Stats:
        """The gauges of this moment."""
        return Stats(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting + self._scheduler.loading,
            waiting_for_kv=self._scheduler.loading,
            kv_usage=self._blocks.usage,
            free_blocks=self._blocks.free_count,
            num_blocks=self._blocks.num_blocks,
            held_requests=self._blocks.held_count,
        )

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False, and nothing done, while any block is in use."""
        return self._blocks.reset_prefix_cache()

    def submit(self, request: Request) -> Generation:
        """Start a request. Raises RequestRejected when it can never run here."""
        generation = Generation(request.request_id, self.abort)
        if self._stopped is not None:
            generation.put(Delta(finish_reason="error", error=self._stopped))
            return generation
        self.limits.check(request)
        if request.request_id in self._sequences or self._blocks.is_held(request.request_id):
            raise RequestRejected(f"request id {request.request_id!r} is in use")
        seq = self._sequence(request)
        if (error := self._refuse_unfit_kv(seq)) is not None:
            generation.put(error)
            return generation
        if self._kept is not None and seq.is_kept:
            self._kept.open(seq)
        if seq.remote is not None:
            self._queued_remote.append(seq)
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

    def release_kept(self, request_id: str) -> None:
        """Free a finished prompt's KV that no reader was told of; any other is left alone."""
        if self._kept is not None:
            self._kept.release(request_id)

    async def kept_read(self) -> None:
        """Return once no finished prompt's KV waits for a reader."""
        while self._blocks.held_count:
            self._hold_over.clear()
            await self._hold_over.wait()

    async def release_remote(self, params: TransferParams) -> None:
        """Tell the producer that nobody will read; for a request refused before `submit`."""
        if self._pulls is not None:
            await self._pulls.puller.release(params)

    def _prepare(self, runner: Runner) -> None:
        config, cache = self.config, runner.cache
        self._blocks = BlockManager(cache.num_blocks, config.block_size, self._observer.kv_event)
        self._scheduler = Scheduler(
            self._blocks, max_seqs=config.max_num_seqs, max_tokens=config.max_num_batched_tokens
        )
        self.limits = Limits(
            runner.max_model_len,
            runner.model_config.vocab_size,
            cache.num_blocks,
            config.block_size,
        )
        if (transfer := config.kv_transfer) is None:
            return
        if transfer.role.produces:
            self._kept = KeptPrompts(
                transfer, cache, self._blocks, self._observer, self._hold_ended
            )
        if transfer.role.consumes:
            self._pulls = Pulls(Puller(cache.layers, cache.layout), self._pull_ended)

    def _hold_ended(self) -> None:
        self._wake.set()
        self._hold_over.set()

    def _sequence(self, request: Request) -> Sequence:
        """Without the matching role a hand-off is ignored and the request served whole."""
        able = self._kept if isinstance(request.kv, RemoteDecode) else self._pulls
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
            arrived=time.perf_counter(),
            remote=request.kv if isinstance(request.kv, TransferParams) else None,
        )

    def _refuse_unfit_kv(self, seq: Sequence) -> Delta | None:
        """Let go of remote KV that is not this prompt's; the error when policy says fail."""
        if seq.remote is None or self._pulls is None:
            return None
        why = refusal(seq.remote, seq.request.prompt_token_ids, self.config.block_size)
        if why is None:
            return None
        self._pulls.drop(seq.id, seq.remote)
        seq.remote = None
        return self._load_failed(seq, KvRefused(why))

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._stopped is None:
                self._wake.clear()
                step = self._scheduler.schedule()
                self._begin(step)
                if not step.chunks:
                    await self._wake.wait()
                    continue
                early = self._kept.early_progress(step.chunks) if self._kept is not None else None
                run = partial(self._runner.run, step.chunks, early)
                results = await loop.run_in_executor(self._worker, run)
                self._in_step = frozenset()
                for chunk, sampled in zip(step.chunks, results, strict=True):
                    self._advance(chunk, sampled)
        except Exception:  # noqa: BLE001 - the loop's top: every request must learn of it
            _log.exception("a step failed: the engine is stopping")
            self._stopped = "the engine failed in a step: see its log, and restart it"
            self._in_step = frozenset()
            for seq in list(self._sequences.values()):
                self._end(seq, Delta(finish_reason="error", error=self._stopped))

    def _begin(self, step: Step) -> None:
        """Everything that a planned step brings with it, before it runs."""
        now = time.perf_counter()
        self._in_step = frozenset(chunk.sequence for chunk in step.chunks)
        for seq in self._in_step:
            seq.started = seq.started or now
        for seq in step.preempted:
            self._observer.preempted()
            if self._kept is not None and seq.is_kept:
                self._kept.reopen(seq)
        for seq in step.admitted:
            self._observer.prefix_cache(seq.prompt_tokens, seq.cached)
        if self._pulls is not None:
            self._begin_pulls(step, self._pulls)

    def _begin_pulls(self, step: Step, pulls: Pulls) -> None:
        for seq in step.loads:
            pulls.begin(seq, self._blocks.table(seq.id), seq.computed // self.config.block_size)
        for seq, params in step.spared:
            pulls.drop(seq.id, params)
        for seq in self._queued_remote:
            if seq.phase is Phase.WAITING and seq.remote is not None:
                pulls.keep_alive(seq.id, seq.remote)
        self._queued_remote.clear()

    def _advance(self, chunk: Chunk, sampled: Sampled | None) -> None:
        seq = chunk.sequence
        if seq.aborted:
            self._take_out(seq)
            return
        self._scheduler.advance(chunk, sampled.token if sampled is not None else None)
        if self._kept is not None and seq.is_kept:
            self._kept.computed(chunk)
        if sampled is not None:
            self._observer.generated(1)
            self._deliver(seq, sampled)

    def _deliver(self, seq: Sequence, sampled: Sampled) -> None:
        stopped = sampled.token in seq.stops
        is_last = stopped or seq.generated >= seq.max_tokens
        kept = self._kept if seq.is_kept else None
        delta = Delta(
            token_ids=(sampled.token,),
            logprobs=(sampled.logprobs,) if sampled.logprobs is not None else (),
            finish_reason=("stop" if stopped else "length") if is_last else None,
            stop_token=sampled.token if stopped else None,
            timing=self._first_token(seq) if seq.generated == 1 else None,
            kv_transfer_params=kept.params(seq) if kept is not None else None,
        )
        self._generations[seq.id].put(delta)
        if is_last:
            self._take_out(seq, hold=kept is not None)

    def _first_token(self, seq: Sequence) -> Timing:
        """The token that is computed again after a pull counts as pulled, as in vLLM."""
        started, pulled = seq.started or seq.arrived, seq.pulled
        seconds = pulled.seconds if pulled is not None else 0.0
        external = pulled.tokens if pulled is not None else 0
        computed = max(0, seq.prompt_tokens - seq.cached - external)
        self._observer.prompt_tokens(computed, seq.cached, external)
        return Timing(
            queue=max(0.0, started - seq.arrived - seconds),
            compute=time.perf_counter() - started,
            cached=seq.cached,
            computed=computed,
            transfer=seconds if pulled is not None else None,
            bytes=pulled.bytes if pulled is not None else None,
        )

    def _end(self, seq: Sequence, last: Delta) -> None:
        """The last delta goes out now, the blocks go back as soon as nobody writes to them."""
        seq.aborted = True
        self._generations[seq.id].put(last)
        if seq.phase is Phase.LOADING and self._pulls is not None:
            self._pulls.cancel(seq.id)
        elif seq not in self._in_step:
            self._take_out(seq)

    def _take_out(self, seq: Sequence, *, hold: bool = False) -> None:
        if self._pulls is not None and seq.remote is not None and seq.phase is Phase.WAITING:
            self._pulls.drop(seq.id, seq.remote)
        del self._sequences[seq.id], self._generations[seq.id]
        self._scheduler.end(seq, hold=hold)
        if self._kept is not None and seq.is_kept:
            (self._kept.hold if hold else self._kept.discard)(seq)
        self._wake.set()

    def _pull_ended(self, seq: Sequence, outcome: Pulled | KvLoadError | None) -> None:
        if seq.aborted or outcome is None:
            self._take_out(seq)
            return
        if isinstance(outcome, Pulled):
            seq.pulled = outcome
            self._observer.pulled(outcome)
            self._observer.external_cache(seq.prompt_tokens - seq.cached, outcome.tokens)
            self._scheduler.loaded(seq, seq.prompt_tokens - 1)
        elif (error := self._load_failed(seq, outcome)) is None:
            self._scheduler.loaded(seq, seq.computed)
        else:
            self._generations[seq.id].put(error)
            self._take_out(seq)
        self._wake.set()

    def _load_failed(self, seq: Sequence, err: KvLoadError) -> Delta | None:
        """Count it; the request's end when the policy is fail, None when it is recompute."""
        self._observer.pull_failed()
        self._observer.external_cache(seq.prompt_tokens - seq.cached, 0)
        transfer = self.config.kv_transfer
        if transfer is not None and transfer.policy is LoadFailurePolicy.RECOMPUTE:
            _log.warning("%s: remote KV not loaded, recomputing: %s", seq.id, err)
            return None
        _log.warning("%s: remote KV not loaded: %s", seq.id, err)
        return Delta(finish_reason="error", error=f"remote KV could not be loaded: {err}")
