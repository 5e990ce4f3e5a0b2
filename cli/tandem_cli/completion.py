"""`tandem completion SHELL`: prints click's completion script."""

import click
from click.shell_completion import get_completion_class

from .options import SETTINGS


@click.command("completion", context_settings=SETTINGS)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of `tandem` for SHELL.

    bash and zsh: add eval "$(tandem completion bash)" (or zsh) to the shell's start-up file.
    fish: tandem completion fish > ~/.config/fish/completions/tandem.fish
    """
    completion_class = get_completion_class(shell)
    assert completion_class is not None  # noqa: S101 - the choices are click's own shells
    root = ctx.find_root()
    click.echo(completion_class(root.command, {}, "tandem", "_TANDEM_COMPLETE").source())
