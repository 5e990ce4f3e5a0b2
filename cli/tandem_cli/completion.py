"""`tandem completion SHELL`: click's completion script."""

import click
from click.shell_completion import get_completion_class

from .options import SETTINGS


@click.command("completion", context_settings=SETTINGS)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes `tandem` in SHELL.

    bash: eval "$(tandem completion bash)", and the same for zsh, in your shell's start-up file;
    fish: tandem completion fish > ~/.config/fish/completions/tandem.fish
    """
    found = get_completion_class(shell)
    assert found is not None  # noqa: S101 - the argument's choices are click's own shells
    root = ctx.find_root()
    click.echo(found(root.command, {}, "tandem", "_TANDEM_COMPLETE").source())
