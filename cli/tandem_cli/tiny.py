"""`tandem tiny-model DIRECTORY`: something to serve where there is no model yet."""

from pathlib import Path

import click

from tandem_contract.commandline import fail

from .options import SEED, command


@command("tiny-model")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--seed", type=SEED, default=0, help="Of the random weights: one seed, the same bytes."
)
def tiny_model(directory: Path, seed: int) -> None:
    """Write a tiny Llama with random weights into DIRECTORY.

    Its words mean nothing; it is for trying Tandem on a machine without a model or a GPU. A
    DIRECTORY that holds another model is left as it is.
    """
    try:
        if directory.exists() and any(directory.iterdir()):
            fail(
                f"{directory} is not empty: serve what is there, or name a new directory", status=2
            )
        # Torch takes seconds to import: --help and the refusal above do without.
        from tandem_engine.tiny import make_tiny_model  # noqa: PLC0415

        make_tiny_model(directory, seed=seed)
    except OSError as err:
        fail(f"{directory}: cannot write the model there: {err.strerror}", status=2)
    click.echo(f"{directory} holds a tiny Llama with random weights.")
