"""The flags of `tandem bench`, in the sections in which `--help` shows them."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from tandem_contract.commandline import DURATION
from tandem_contract.request_kinds import RequestKind
from tandem_loadtest.workload.presets import PRESETS

F = TypeVar("F", bound=Callable[..., Any])

COUNT: Final = click.IntRange(min=1)
POSITIVE: Final = click.FloatRange(min=0, min_open=True, max=1e6)
"""Rates and the like; the bound refuses infinity."""
SHARE: Final = click.FloatRange(0, 1)
_FILE: Final = click.Path(path_type=Path, dir_okay=False)
_OUTPUT: Final = click.Path(path_type=Path, dir_okay=False, writable=True)


class SectionOption(click.Option):
    """An option that `--help` shows in a section."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class SectionCommand(click.Command):
    """A command whose `--help` shows the options by section, those without one last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                name = parameter.section if isinstance(parameter, SectionOption) else "Other"
                sections.setdefault(name, []).append(record)
        sections["Other"] = sections.pop("Other", [])
        for name, records in sections.items():
            with formatter.section(name):
                formatter.write_dl(records)


def _section(name: str) -> Callable[..., Callable[[F], F]]:
    return partial(click.option, cls=SectionOption, section=name)


_load = _section("Load")
_workload = _section("Workload")
_requests = _section("Requests")
_measuring = _section("Measuring")
_output = _section("Output")

_FLAGS: Final[Sequence[Callable[[Any], Any]]] = (
    _load(
        "--rate",
        type=POSITIVE,
        help="Sessions per second on average.  [default: the trace's own, or 1]",
    ),
    _load(
        "--arrivals",
        type=click.Choice(["poisson", "constant", "gamma", "ramp"]),
        help="How sessions arrive at --rate; a ramp goes from --rate to --rate-end.  "
        "[default: poisson]",
    ),
    _load(
        "--burstiness",
        type=POSITIVE,
        help="With --arrivals gamma: below 1 bursts, 1 is Poisson, above 1 regular.  [default: 1]",
    ),
    _load(
        "--rate-end",
        type=POSITIVE,
        help="With --arrivals ramp: sessions per second at the end of --duration.",
    ),
    _load(
        "--concurrency",
        type=COUNT,
        help="Closed loop instead: as many sessions at a time, the next when one ends. Hides a "
        "server's queue: prefer --rate.",
    ),
    _load(
        "--limit",
        type=COUNT,
        help="Number of sessions.  [default: 100, or as many as --duration takes; all of a trace]",
    ),
    _load("--duration", type=DURATION, help="No session starts after this time, like 60s."),
    _load(
        "--max-in-flight",
        type=COUNT,
        default=1000,
        help="Concurrent requests; further ones count as unsent and are not sent late.",
    ),
    _load(
        "--processes",
        type=COUNT,
        default=1,
        help="Worker processes that send, all of one schedule.",
    ),
    _workload(
        "--workload",
        type=click.Choice(list(PRESETS)),
        help="What the sessions say (docs/operate/load-tests.md describes them).  [default: fixed]",
    ),
    _workload(
        "--trace",
        type=_FILE,
        help="Replay a Mooncake JSONL or Azure CSV trace, at its own times or at --rate.",
    ),
    _workload(
        "--conversations", type=_FILE, help="Send the conversations of a ShareGPT-like JSON file."
    ),
    _workload(
        "--prompt-tokens",
        type=COUNT,
        help="Mean tokens of a prompt; of a trace, the longest: others shrink in proportion. "
        "[default: the workload's]",
    ),
    _workload(
        "--output-tokens",
        type=COUNT,
        help="Mean tokens of an answer; of a trace, the longest.  [default: the workload's]",
    ),
    _workload(
        "--shared", type=SHARE, help="Share of every prompt that is a system prompt common to all."
    ),
    _workload("--long", "long", type=SHARE, help="With --workload bimodal: share of long prompts."),
    _workload(
        "--turns",
        type=COUNT,
        help="Requests of a session, each with the whole conversation before it.",
    ),
    _workload(
        "--think",
        type=DURATION,
        help="Mean time between an answer and the next turn, or the next session of --concurrency.",
    ),
    _workload(
        "--adapter",
        "adapters",
        multiple=True,
        metavar="NAME=WEIGHT",
        help="Send this model name (a LoRA adapter) to a share of the sessions; repeatable.",
    ),
    _workload(
        "--tokenizer",
        type=click.Path(path_type=Path),
        help="The model's tokenizer.json or its directory: prompts then have the exact number of "
        "tokens. Without it, completions send token ids, and text is calibrated by the server's "
        "usage.",
    ),
    _workload(
        "--seed",
        type=int,
        help="Seed of prompts and arrivals; each repeat adds 1. The same seed sends the same "
        "prompts, which the server may have cached.  [default: another one each time]",
    ),
    _requests("--model", required=True, help="Model name to send."),
    _requests(
        "--endpoint",
        type=click.Choice([kind.value for kind in RequestKind]),
        default=RequestKind.COMPLETIONS.value,
        help="API to use.",
    ),
    _requests(
        "--stream/--no-stream",
        default=True,
        help="Stream the answers; without it there is no TTFT and no ITL.",
    ),
    _requests("--timeout", type=DURATION, default="5m", help="Time limit for one complete answer."),
    _requests(
        "--header",
        "headers",
        multiple=True,
        metavar="NAME:VALUE",
        help="Sent with every request; repeatable.",
    ),
    _requests(
        "--api-key",
        envvar=["TANDEM_BENCH_API_KEY", "OPENAI_API_KEY"],
        show_envvar=True,
        help="Sent as a bearer token. Better in the environment than here, where others see it.",
    ),
    _requests(
        "--ca-file",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="PEM file of certificate authorities to trust.  [default: the system's]",
    ),
    _requests(
        "--extra-body",
        default="{}",
        metavar="JSON",
        help="Members added to every body, like '{\"top_k\": 20}'.",
    ),
    _requests("--temperature", type=click.FloatRange(min=0), default=0.0, help="0 is greedy."),
    _requests(
        "--ignore-eos/--no-ignore-eos",
        default=True,
        help="Generate exactly the planned number of tokens (a field of vLLM).",
    ),
    _measuring(
        "--wait",
        type=DURATION,
        default="0s",
        help="How long to wait for the server to become ready.",
    ),
    _measuring(
        "--warm-up",
        type=click.IntRange(min=0),
        default=10,
        help="Sessions before the first repeat that count nowhere.",
    ),
    _measuring(
        "--repeats",
        type=COUNT,
        default=1,
        help="Runs of the whole schedule; two or more give confidence intervals.",
    ),
    _measuring("--slo-ttft", type=DURATION, help="TTFT limit of a good request, like 500ms."),
    _measuring("--slo-itl", type=DURATION, help="Limit of a good request's mean ITL, like 50ms."),
    _measuring("--slo-e2e", type=DURATION, help="Limit of a good request's whole time, like 10s."),
    _measuring(
        "--find-rate",
        type=click.FloatRange(0, 1, min_open=True),
        metavar="SHARE",
        help="Find the highest rate at which this share of requests meets the SLO, in steps of "
        "--duration each, and measure it.",
    ),
    _measuring(
        "--at",
        "commands",
        type=(DURATION, str),
        multiple=True,
        metavar="TIME COMMAND",
        help="Run a shell command at this time of each repeat and mark it in the report; "
        "repeatable.",
    ),
    _measuring(
        "--reference",
        metavar="URL",
        help="Compare every answer with this server's (greedy only), after the run.",
    ),
    _measuring("--reference-model", help="Model name on the reference server.  [default: as sent]"),
    _measuring(
        "--reference-api-key",
        envvar="TANDEM_BENCH_REFERENCE_API_KEY",
        show_envvar=True,
        help="Sent to the reference server only, as a bearer token.",
    ),
    _measuring(
        "--metrics",
        "metrics_urls",
        multiple=True,
        metavar="URL",
        help="Prometheus page to read beside the run, vLLM's or Tandem's; repeatable.",
    ),
    _measuring("--gpus", type=COUNT, help="GPUs of the server: figures per GPU are shown, too."),
    _output(
        "--json",
        "json_file",
        type=_OUTPUT,
        help="Write the report to this file as JSON (docs/reference/bench-report.schema.json).",
    ),
    _output(
        "--html",
        "html_file",
        type=_OUTPUT,
        help="Write the report to this file as one web page that needs no network.",
    ),
)


def all_flags(function: F) -> F:
    """Every flag of `tandem bench`."""
    for flag in reversed(_FLAGS):
        function = flag(function)
    return function
