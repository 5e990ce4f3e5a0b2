"""`tandem render`: prints the Pods of pools; needs no cluster and starts nothing."""

import sys
from pathlib import Path
from typing import Any

import click
import msgspec
from ruamel.yaml import YAML

from tandem_contract.commandline import fail
from tandem_contract.documents import DocumentError
from tandem_local.pool_files import read_pool_sets
from tandem_operator.pods.manifests import pods

from .options import command, files_option


@command("render")
@files_option
@click.option(
    "-o",
    "--output",
    type=click.Choice(["yaml", "json"]),
    default="yaml",
    help="Output format.",
)
def render(paths: tuple[Path, ...], output: str) -> None:
    """Print the Pods of PrefillPools and DecodePools as YAML documents or as a JSON List."""
    try:
        manifests = [pod for pool_set in read_pool_sets(paths) for pod in pods(pool_set)]
    except DocumentError as err:
        fail(str(err), status=2)
    if output == "json":
        click.echo(as_json(manifests))
    else:
        yaml = YAML()
        yaml.indent(mapping=2, sequence=4, offset=2)
        yaml.width = 100
        yaml.dump_all(manifests, sys.stdout)


def as_json(manifests: list[dict[str, Any]]) -> str:
    """A Kubernetes List, the form in which kubectl prints several objects."""
    object_list = {"apiVersion": "v1", "kind": "List", "items": manifests}
    return msgspec.json.format(msgspec.json.encode(object_list), indent=2).decode()
