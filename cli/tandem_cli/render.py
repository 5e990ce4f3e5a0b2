"""`tandem render`: prints what the pools become, without a cluster and without running anything."""

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
@click.option("-o", "--output", type=click.Choice(["yaml", "json"]), default="yaml")
def render(paths: tuple[Path, ...], output: str) -> None:
    """Print the Pods of PrefillPools and DecodePools: YAML documents, or a JSON List."""
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
    """A Kubernetes List, as kubectl prints several objects."""
    listed = {"apiVersion": "v1", "kind": "List", "items": manifests}
    return msgspec.json.format(msgspec.json.encode(listed), indent=2).decode()
