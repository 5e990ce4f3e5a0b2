"""Many requests at once, while prefill engines are killed and started again."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from tandem_loadtest.calls import Call

from .asking import BROKEN, HUNG, Told, ask
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
    told: list[tuple[Call, Told]] = field(default_factory=list)
    _restarts: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._next_kill = self._rng.randint(*self.between_kills)

    async def blow(self, count: int) -> None:
        """Ask `count` requests; returns with every engine serving again."""
        calls = iter([self._call(index) for index in range(count)])
        await asyncio.gather(*(self._client(calls) for _ in range(AT_A_TIME)))
        await asyncio.gather(*self._restarts)

    async def wrong(self, engine: Engine) -> list[Told]:
        """The whole answers that `engine`, which never read another's KV, does not give."""
        answered = [(it, told) for it, told in self.told if not told.error]
        places = asyncio.Semaphore(AT_A_TIME)

        async def right(it: Call, told: Told) -> bool:
            async with places:
                same = await ask(self.pair.http, engine.url, replace(it, stream=False))
            assert same.error == ""
            return same.tokens == told.tokens and len(told.tokens) == it.max_tokens

        verdicts = await asyncio.gather(*(right(it, told) for it, told in answered))
        return [told for (_, told), ok in zip(answered, verdicts, strict=True) if not ok]

    def unclear(self) -> list[Told]:
        """Answers that were none: hung, cut without a word, or an error that says nothing."""
        return [
            told
            for _, told in self.told
            if told.error.startswith((HUNG, BROKEN)) or (told.status != 200 and not told.error)
        ]

    def summary(self) -> str:
        """How the requests fared, in a line."""
        paths = Counter(told.path for _, told in self.told if not told.error)
        failed = sum(1 for _, told in self.told if told.error)
        served = ", ".join(f"{count} {path}" for path, count in sorted(paths.items()))
        return f"{len(self.told)} requests, {self.kills} kills: {served}, {failed} failed"

    async def _client(self, calls: Iterator[Call]) -> None:
        for it in calls:
            order = self._rng.sample(self.prefills, k=len(self.prefills))
            told = await self.pair.ask(it, *(engine.address for engine in order))
            self.told.append((it, told))
            if len(self.told) >= self._next_kill:
                self._next_kill += self._rng.randint(*self.between_kills)
                self._kill()

    def _kill(self) -> None:
        """One of those that serve; it comes back as soon as it can."""
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
