"""The live display of `tandem bench`, on stderr."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from tandem_loadtest.records import COMPLETE
from tandem_loadtest.run.options import BenchProgress

OnProgress = Callable[[BenchProgress], None]


@contextmanager
def live_display() -> Iterator[OnProgress]:
    """A bar for each step of the benchmark: warm-up, steps of a search, repeats."""
    console = Console(stderr=True)
    bars = Bars(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
        # stdout has the tables only, so that they can be piped.
        console=console,
        # Bars in a log file are noise.
        disable=not console.is_terminal,
    )
    tasks: dict[str, TaskID] = {}

    def show(progress: BenchProgress) -> None:
        name = step_name(progress)
        if name not in tasks:
            # The clock of the step before would go on otherwise.
            if tasks:
                bars.stop_task(next(reversed(tasks.values())))
            tasks[name] = bars.add_task(name, total=None, state="")
        bars.update(
            tasks[name],
            completed=progress.finished,
            total=progress.scheduled or None,
            state=state_text(progress),
        )

    with bars:
        yield show


def step_name(progress: BenchProgress) -> str:
    """The step in words: `repeat 2 of 3`, `search, step 4, 12.5/s`."""
    if progress.phase == "search":
        rate = "" if progress.rate is None else f", {progress.rate:.3g}/s"
        return f"search, step {progress.step}{rate}"
    if progress.phase == "repeat" and progress.steps is not None and progress.steps > 1:
        return f"repeat {progress.step} of {progress.steps}"
    return progress.phase


def state_text(progress: BenchProgress) -> str:
    """Requests in flight, and the losses so far by outcome."""
    losses = {
        outcome: count
        for outcome, count in sorted(progress.outcomes.items())
        if outcome not in COMPLETE and count
    }
    parts = [f"{progress.in_flight} in flight", *(f"{n} {name}" for name, n in losses.items())]
    return ", ".join(parts)
