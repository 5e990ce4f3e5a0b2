"""Many requests at once, while prefill engines are killed and started again."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from tandem_loadtest.calls import Call

from .client import BROKEN, HUNG, ClientResult, ask
from .engine import Engine
from .pair import Pair, call

AT_A_TIME = 16


@dataclass
class Storm:
    """Random and reproducible by the seed, except which requests a kill hits."""

    pair: Pair
    prefills: Sequence[Engine]
    seed: int
    between_kills: tuple[int, int]
    """Smallest and largest number of answers between two kills."""
    kills: int = 0
    results: list[tuple[Call, ClientResult]] = field(default_factory=list)
    _restarts: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._next_kill = self._rng.randint(*self.between_kills)

    async def blow(self, count: int) -> None:
        """Ask `count` requests; returns with every engine serving again."""
        calls = iter([self._call(index) for index in range(count)])
        await asyncio.gather(*(self._client(calls) for _ in range(AT_A_TIME)))
        await asyncio.gather(*self._restarts)

    async def wrong(self, engine: Engine) -> list[ClientResult]:
        """Complete answers that differ from those of `engine`, which never read another's KV."""
        answers = [(request, result) for request, result in self.results if not result.error]
        places = asyncio.Semaphore(AT_A_TIME)

        async def is_right(request: Call, result: ClientResult) -> bool:
            async with places:
                direct = await ask(self.pair.http, engine.url, replace(request, stream=False))
            assert direct.error == ""
            return direct.tokens == result.tokens and len(result.tokens) == request.max_tokens

        verdicts = await asyncio.gather(*(is_right(request, result) for request, result in answers))
        return [result for (_, result), ok in zip(answers, verdicts, strict=True) if not ok]

    def unclear(self) -> list[ClientResult]:
        """Requests that hung, that were cut, or that failed without an error message."""
        return [
            result
            for _, result in self.results
            if result.error.startswith((HUNG, BROKEN))
            or (result.status != 200 and not result.error)
        ]

    def summary(self) -> str:
        """Counts of requests, kills, routing paths and failures, in a line."""
        paths = Counter(result.path for _, result in self.results if not result.error)
        failed = sum(1 for _, result in self.results if result.error)
        served_by_path = ", ".join(f"{count} {path}" for path, count in sorted(paths.items()))
        return (
            f"{len(self.results)} requests, {self.kills} kills: {served_by_path}, {failed} failed"
        )

    async def _client(self, calls: Iterator[Call]) -> None:
        for request in calls:
            order = self._rng.sample(self.prefills, k=len(self.prefills))
            result = await self.pair.ask(request, *(engine.address for engine in order))
            self.results.append((request, result))
            if len(self.results) >= self._next_kill:
                self._next_kill += self._rng.randint(*self.between_kills)
                self._kill()

    def _kill(self) -> None:
        """Kill a random serving engine and start it again at once."""
        serving = [engine for engine in self.prefills if engine.serves]
        if serving:
            victim = self._rng.choice(serving)
            victim.kill()
            self.kills += 1
            self._restarts.add(asyncio.create_task(victim.up()))

    def _call(self, index: int) -> Call:
        rng = self._rng
        return call(
            self.seed * 100_000 + index,
            length=rng.randint(20, 120),
            tokens=rng.randint(1, 8),
            stream=rng.random() < 0.5,
        )
