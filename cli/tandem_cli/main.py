"""`tandem`: imports each subcommand only when it is used, so that `--help` is quick."""

import importlib
from difflib import get_close_matches
from importlib.metadata import version
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from tandem_contract.commandline import fail

from .options import SETTINGS

_COMMANDS: Final = {
    "bench": ("tandem_cli.bench", "command"),
    "completion": ("tandem_cli.completion", "completion"),
    "demo": ("tandem_cli.demo", "demo"),
    "doctor": ("tandem_cli.doctor", "doctor"),
    "plan": ("tandem_cli.plan", "plan"),
    "profile": ("tandem_cli.profile", "profile"),
    "render": ("tandem_cli.render", "render"),
    "status": ("tandem_cli.status", "status"),
    "store": ("tandem_cli.store", "store"),
    "tiny-model": ("tandem_cli.tiny", "tiny_model"),
    "trace": ("tandem_cli.trace", "trace"),
    "up": ("tandem_cli.up", "up"),
}
"""Subcommand → module and attribute of its click command."""

_SUMMARIES: Final = {
    "bench": "Send load to an OpenAI endpoint and report what its clients saw.",
    "completion": "Print the script that completes this command in a shell.",
    "demo": "Serve a model disaggregated on this machine and check every answer.",
    "doctor": "Check a running stack or cluster and print problems with their fixes.",
    "plan": "Say how many pods of what a workload needs.",
    "profile": "Measure an engine for tandem plan.",
    "render": "Print the Pods of pools.",
    "status": "Show the stack of this machine, or the pools of a cluster.",
    "store": "Serve a directory as an HTTP store for KV tensors.",
    "tiny-model": "Write a tiny model with random weights, for trials.",
    "trace": "Show the history of one request, by its id.",
    "up": "Run pools on this machine.",
}
"""Subcommand → its line in `tandem --help`, which imports none of them."""


_ENGINE_EXTRA: Final = ("torch", "safetensors", "numpy", "zmq")
"""Modules that only the extra `engine` installs."""


class LazyGroup(click.Group):
    """A group that imports a subcommand's module when the subcommand is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The subcommands' names."""
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The subcommand, imported now."""
        if cmd_name not in _COMMANDS:
            return None
        module, attribute = _COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)  # noqa: S101 - _COMMANDS names commands only
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The subcommand of `args`; the error for a name that is none suggests a like one."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as err:
            near = get_close_matches(args[0], _COMMANDS, n=1)
            if not near:
                raise
            raise click.UsageError(f"{err.message} Did you mean {near[0]!r}?", ctx) from err

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand; if it needs a module of the extra `engine`, say how to install it."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as err:
            if err.name not in _ENGINE_EXTRA:
                raise
            fail(f"this command needs {err.name}: pip install 'tandem-llm[engine]'")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The subcommands and options that begin with `incomplete`; imports none of them."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [
            CompletionItem(name, help=summary)
            for name, summary in sorted(_SUMMARIES.items())
            if name.startswith(incomplete)
        ]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of subcommands in `--help`, from the summaries."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(_SUMMARIES.items()))


@click.command(
    "tandem", cls=LazyGroup, context_settings={**SETTINGS, "auto_envvar_prefix": "TANDEM"}
)
@click.version_option(version("tandem-llm"), prog_name="tandem")
def main() -> None:
    """Serve large language models with prefill and decode on separate pods."""
