"""Error of what the EPP learns of the torch engine's prefills, as they really take.

Real Envoy, EPP and engine. In each round the EPP learns from 50 prompts of 200 to 3,500 tokens, one
at a time. The truth, which is measured before, between and after parts of them, is the median of
the engine's own `vllm:request_prefill_time_seconds` at eight lengths, six times each; its noise is
the standard error of such a median. `pytest -m vllm -s tests/vllm/test_timing.py -k own_prefill`
prints the same for real vLLM.
"""

import asyncio
import tempfile
from pathlib import Path
from typing import Final

import click
from tests.epp.estimates.learning import ENGINE, LIMIT, Learned, Requests, attempt
from tests.sidecar.real.engine import SERVED, engines

from .figures import Figure, at_most, report, without_target

CASES: Final = {
    "the engine's report": Requests(SERVED),
    "streams without the header": Requests(SERVED, is_stream=True, has_timing=False),
}


async def measure(directory: Path, requests: Requests) -> Learned:
    """Let a fresh EPP learn of a fresh engine."""
    [engine] = engines(directory, engine={"flags": ("--dtype", "float32")})
    await engine.up()
    try:
        backend = {"name": ENGINE, "url": engine.url, "role": "unified", "models": [SERVED]}
        return await attempt(directory, engine.url, [backend], requests)
    finally:
        engine.kill()


async def run(rounds: int) -> list[Figure]:
    """The figures of all cases, which alternate."""
    learned: dict[str, list[Learned]] = {name: [] for name in CASES}
    for _ in range(rounds):
        for name, requests in CASES.items():
            with tempfile.TemporaryDirectory() as directory:
                result = await measure(Path(directory), requests)
            click.echo(f"{name}: {result}")
            learned[name].append(result)
    figures = []
    for name, results in learned.items():
        errors = [100 * result.error(result.truth) for result in results]
        figures += [
            at_most(f"median error of the estimate, {name}", errors, "%", 100 * LIMIT),
            without_target(
                f"noise of the truth, {name}", [100 * result.noise for result in results], "%"
            ),
        ]
    return figures


@click.command()
@click.option("--rounds", default=3, show_default=True)
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
def main(rounds: int, file: Path | None) -> None:
    """Measure how well the EPP learns the torch engine's prefills."""
    report(asyncio.run(run(rounds)), file)


if __name__ == "__main__":
    main()
