"""`tandem profile URL`: the command line, and the order of the measurements."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import click
from rich.console import Console

from tandem_cli.options import command
from tandem_contract.commandline import DURATION, fail
from tandem_loadtest.client import Client, ClientSettings, SettingsError
from tandem_planner.simulation.engine import Batching

from .file import ProfileError, ProfileFile, read_profile, write_profile
from .measure import Prober

_SHORTEST: Final = 64
_REPEATS: Final = 3
"""Prefills of each length."""


@command("profile")
@click.argument("url")
@click.option("--model", required=True, help="Model name to send.")
@click.option("--longest", type=click.IntRange(_SHORTEST), default=4096, help="Longest prompt.")
@click.option("--most", type=click.IntRange(1), default=32, help="Most answers at a time.")
@click.option("--tensor", type=click.IntRange(1), default=1, help="GPUs of the engine.")
@click.option(
    "--max-num-batched-tokens",
    "budget",
    type=click.IntRange(1),
    default=2048,
    help="Tokens of a step of the engine.",
)
@click.option("--held-out", type=DURATION, default="60s", help="Load that checks the fit.")
@click.option(
    "-o",
    "--output",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    default="profile.json",
    help="File to write; measured points that it has are not measured again.",
)
def profile(
    *,
    url: str,
    model: str,
    longest: int,
    most: int,
    tensor: int,
    budget: int,
    held_out: float,
    file: Path,
) -> None:
    """Measure the engine behind URL, for `tandem plan --profile FILE`.

    The engine must serve no other client meanwhile. After each point the file is written, so that a
    profile that was interrupted goes on. At last a load that the fit has not seen says how exact
    it is.
    """
    try:
        result = _resumed(file, ProfileFile(model, url, tensor))
        settings = ClientSettings(url=url, model=model)
        console = Console(stderr=True)
        with console.status("connecting") as status:
            asyncio.run(
                _measure(
                    result,
                    settings,
                    lengths=list(_lengths(longest)),
                    batches=list(_batches(most)),
                    batching=Batching(budget, max(most, 256)),
                    held_out=held_out,
                    save=lambda: write_profile(file, result),
                    progress=status.update,
                )
            )
        click.echo(_summary(result, file))
    except (ProfileError, SettingsError) as err:
        fail(str(err))


def _resumed(file: Path, new: ProfileFile) -> ProfileFile:
    """What the file has, if it is of the same engine. Raises ProfileError."""
    if not file.exists():
        return new
    old = read_profile(file)
    if (old.model, old.url, old.tensor) != (new.model, new.url, new.tensor):
        raise ProfileError(
            f"{file}: is of {old.model} at {old.url} with {old.tensor} GPUs: remove it, or write "
            "to another file with -o"
        )
    return old


def _lengths(longest: int) -> Iterator[int]:
    """Prompts of the prefills: each twice as long as the one before."""
    tokens = _SHORTEST
    while tokens < longest:
        yield tokens
        tokens *= 2
    yield longest


def _batches(most: int) -> Iterator[int]:
    decodes = 1
    while decodes < most:
        yield decodes
        decodes *= 4
    yield most


async def _measure(
    result: ProfileFile,
    settings: ClientSettings,
    *,
    lengths: list[int],
    batches: list[int],
    batching: Batching,
    held_out: float,
    save: Callable[[], None],
    progress: Callable[[str], None],
) -> None:
    """Measure what `result` lacks. Raises ProfileError."""
    async with Client(settings) as client:
        prober = Prober(client)
        progress("warm-up")
        await prober.warm_up(lengths[-1])
        for tokens in lengths:
            while sum(point.tokens == tokens for point in result.prefills) < _REPEATS:
                progress(f"prefill of {tokens} tokens")
                result.prefills.append(await prober.prefill(tokens))
                save()
        shortest, *_, longest = [*lengths, lengths[-1]]
        measured = {(point.decodes, round(point.context)) for point in result.decodes}
        for decodes in batches:
            for prompt in {shortest, longest // 2}:
                if any(d == decodes and prompt <= c <= 1.5 * prompt + 200 for d, c in measured):
                    continue
                progress(f"{decodes} answers of prompts of {prompt} tokens")
                result.decodes.append(await prober.decode(decodes, prompt))
                save()
        progress(f"held out: {held_out:.0f} s of load")
        result.held_out = await prober.held_out(result.fitted(), batching, held_out)
        save()


def _summary(result: ProfileFile, file: Path) -> str:
    engine, held = result.fitted(), result.held_out
    step = engine.step
    lines = [
        f"a step: {1e3 * step.fixed:.3g} ms + {1e6 * step.per_decode:.3g} µs per answer + "
        f"{1e9 * step.per_context:.3g} ns per KV token read + {1e6 * step.per_token:.3g} µs per "
        f"prompt token + {1e9 * step.per_pair:.3g} ns per n² + 2 n cached",
        f"a request beside its steps: {1e3 * engine.request:.3g} ms",
        f"measured: prompts to {engine.longest_prompt:,} tokens, to {engine.most_decodes} answers",
    ]
    if held is not None:
        lines.append(
            f"held out, {held.requests} requests: TTFT p50 {held.ttft_p50:+.0%}, p99 "
            f"{held.ttft_p99:+.0%}; ITL p50 {held.itl_p50:+.0%}, p99 {held.itl_p99:+.0%} "
            "(predicted over measured)"
        )
    return "\n".join([*lines, f"written to {file}"])
