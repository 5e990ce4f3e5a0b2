"""`tandem tiny-model DIRECTORY`: a small model for trying Tandem without a real one."""

from pathlib import Path

import click

from tandem_contract.commandline import fail

from .options import SEED, command


@command("tiny-model")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--seed",
    type=SEED,
    default=0,
    help="Seed of the random weights; the same seed gives the same bytes.",
)
def tiny_model(directory: Path, seed: int) -> None:
    """Write a tiny Llama with random weights into DIRECTORY.

    Its output is meaningless; it is for trying Tandem on a machine without a model or a GPU. The
    command refuses a DIRECTORY that is not empty.
    """
    try:
        if directory.exists() and any(directory.iterdir()):
            fail(
                f"{directory} is not empty: serve the model in it, or name a new directory",
                status=2,
            )
        # Imported here, because torch takes seconds: --help and the error above do not need it.
        from tandem_engine.tiny import make_tiny_model  # noqa: PLC0415

        make_tiny_model(directory, seed=seed)
    except OSError as err:
        fail(f"{directory}: cannot write the model: {err.strerror}", status=2)
    click.echo(f"Wrote a tiny Llama with random weights to {directory}.")
