"""The answer of `tandem plan` for a terminal."""

from collections.abc import Callable
from functools import partial

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .report import Answer, Figure, Option

_TIMES = (
    ("TTFT p50", "ttft_p50"),
    ("TTFT p99", "ttft_p99"),
    ("ITL p50", "itl_p50"),
    ("ITL p99", "itl_p99"),
    ("gap p99", "gap_p99"),
    ("E2E p99", "e2e_p99"),
)
"""Heading → figure."""


def view(answer: Answer) -> RenderableType:
    """The options as a table, then the sentences."""
    best = answer.options[0]
    return Group(
        Text(headline(answer), style="bold"),
        Padding(_table(answer), (1, 0)),
        *(Text(line) for line in _sentences(answer, best)),
    )


def headline(answer: Answer) -> str:
    """The best deployment, in a line."""
    best = answer.options[0]
    pods = f"{best.decode.text} pods that compute prompts and answers"
    if best.prefill is not None:
        pods = f"{best.prefill.text} prefill pods and {best.decode.text} decode pods"
    return f"{answer.model} on {round(best.gpus.value)} × {answer.gpu}: {pods}"


def _table(answer: Answer) -> Table:
    """A column for each option, a row for each figure."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    for index, option in enumerate(answer.options):
        table.add_column(option.architecture, style="bold" if index == 0 else "", no_wrap=True)
    rows: list[tuple[str, Callable[[Option], str]]] = [
        ("prefill pods", lambda o: o.prefill.text if o.prefill else "–"),
        ("decode pods", lambda o: o.decode.text),
        ("tokens per step", _steps),
        ("GPUs", lambda o: _count(o.gpus)),
        ("requests/s", lambda o: f"{o.rate:.3g}"),
        *((heading, partial(_time_of, name=name)) for heading, name in _TIMES),
        ("within SLO", lambda o: _share(o.figures["attainment"])),
        ("prefill pods busy", lambda o: f"{o.prefill.busy:.0%}" if o.prefill else "–"),
    ]
    for heading, cell in rows:
        table.add_row(heading, *(cell(option) for option in answer.options))
    return table


def _steps(option: Option) -> str:
    sizes = [pool.max_num_batched_tokens for pool in (option.prefill, option.decode) if pool]
    return " and ".join(f"{size:,}" for size in sizes)


def _time_of(option: Option, name: str) -> str:
    return _seconds(option.figures[name])


def _sentences(answer: Answer, best: Option) -> list[str]:
    network = answer.network
    size, least = f"{network.kv_bytes / 1e9:.2g} GB", network.least_rate / 1e9
    lines = [
        f"What binds: {answer.binding}",
        f"Network: the KV of a prompt of {network.prompt_tokens:,} tokens is {size}. Below "
        f"{least:.3g} GB/s ({8 * least:.3g} Gbit/s) between a prefill and a decode pod, its "
        f"transfer takes more than half of the prefill of {_time(network.prefill)}. Over "
        f"{answer.fabric} it takes {_time(network.transfer)}: {network.verdict}.",
    ]
    if best.hits >= 0.005:
        lines.append(f"Caches: {best.hits:.0%} of the prompt tokens are in a prefix cache.")
    if best.preemptions:
        lines.append(f"Memory: {best.preemptions} requests lost their KV, for want of room.")
    if answer.is_calibrated:
        lines.append(
            "Steps by the profile. In parentheses: if they were faster and slower by its error."
        )
    else:
        lines.append(
            "Not calibrated: computed from data sheets. In parentheses: if engines reach as much "
            "of the peaks as is assumed at best, and at worst. Measure before you buy."
        )
    return lines


def _count(figure: Figure) -> str:
    high = "?" if figure.high is None else f"{figure.high:.0f}"
    return f"{figure.value:.0f} ({figure.low:.0f} – {high})"


def _seconds(figure: Figure) -> str:
    high = "?" if figure.high is None else _time(figure.high)
    return f"{_time(figure.value)} ({_time(figure.low)} – {high})"


def _share(figure: Figure) -> str:
    return f"{figure.value:.1%} ({figure.low:.0%} – {figure.high or 0.0:.0%})"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
