"""Options of `tandem doctor` that name an external store for KV."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from tandem_contract.commandline import fail
from tandem_kvstore.errors import LocationError
from tandem_kvstore.location import (
    DEFAULT_NAMESPACE,
    StoreCredentials,
    StoreLocation,
    store_location,
)

F = TypeVar("F", bound=Callable[..., Any])


def storage_options(function: F) -> F:
    """`--storage URL` and what belongs to it."""
    for option in (
        click.option("--storage-ca-file", type=click.Path(path_type=Path, dir_okay=False),
                     help="PEM file with the authority of the store's certificate."),
        click.option("--storage-credentials", type=click.Path(path_type=Path, file_okay=False),
                     help="Directory with the files access_key and secret_key."),
        click.option("--storage-protocol", type=click.Choice(["s3", "http", "file"]),
                     help="How to speak to the store.  [default: by the URL and the credentials]"),
        click.option("--storage-namespace", default=DEFAULT_NAMESPACE,
                     help="Namespace of the engines' KV; for S3 it begins with the bucket."),
        click.option("--storage", metavar="URL",
                     help="Also read and write an object in this store for KV; alone, without"
                     " engines, too."),
    ):  # fmt: skip
        function = option(function)
    return function


def storage_from(options: dict[str, Any]) -> StoreLocation | None:
    """The store that the options name, which are removed; exits with 2 when they are wrong."""
    endpoint = options.pop("storage")
    namespace = options.pop("storage_namespace")
    protocol = options.pop("storage_protocol")
    directory = options.pop("storage_credentials")
    authority = options.pop("storage_ca_file")
    if endpoint is None:
        return None
    try:
        return store_location(
            endpoint,
            namespace,
            protocol=protocol,
            credentials=StoreCredentials(directory=directory) if directory else None,
            ca_file=authority,
        )
    except LocationError as err:
        fail(f"--storage: {err}", status=2)
