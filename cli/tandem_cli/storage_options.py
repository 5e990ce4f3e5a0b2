"""Options of `tandem doctor` that name an external store for KV."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from tandem_contract.commandline import fail
from tandem_contract.config import ExternalStorage, load_router_config
from tandem_contract.documents import DocumentError
from tandem_kvstore.errors import LocationError
from tandem_kvstore.location import (
    DEFAULT_NAMESPACE,
    DEFAULT_REGION,
    Secret,
    StoreCredentials,
    StoreLocation,
    store_location,
)

F = TypeVar("F", bound=Callable[..., Any])


def storage_options(function: F) -> F:
    """`--storage URL` and what belongs to it, and `--router-file`."""
    for option in (
        click.option("--router-file", type=click.Path(path_type=Path, dir_okay=False),
                     help="As --storage, each store that this file of a tandem-router names, with"
                     " the credentials in it."),
        click.option("--storage-ca-file", type=click.Path(path_type=Path, dir_okay=False),
                     help="PEM file with the authority of the store's certificate."),
        click.option("--storage-credentials", type=click.Path(path_type=Path, file_okay=False),
                     help="Directory with the files access_key and secret_key."),
        click.option("--storage-protocol", type=click.Choice(["s3", "http", "file"]),
                     help="How to speak to the store.  [default: by the URL and the credentials]"),
        click.option("--storage-region", default=DEFAULT_REGION, help="Region of an S3 store."),
        click.option("--storage-namespace", default=DEFAULT_NAMESPACE,
                     help="Namespace of the engines' KV; for S3 it begins with the bucket."),
        click.option("--storage", metavar="URL",
                     help="Also read and write an object in this store for KV; alone, without"
                     " engines, too."),
    ):  # fmt: skip
        function = option(function)
    return function


def stores_from(options: dict[str, Any]) -> tuple[StoreLocation, ...]:
    """The stores that the options name, which are removed; exits with 2 when they are wrong."""
    endpoint = options.pop("storage")
    namespace = options.pop("storage_namespace")
    protocol = options.pop("storage_protocol")
    directory = options.pop("storage_credentials")
    authority = options.pop("storage_ca_file")
    region = options.pop("storage_region")
    file = options.pop("router_file")
    stores = _of_router(file) if file is not None else ()
    if endpoint is None:
        return stores
    try:
        named = store_location(
            endpoint,
            namespace,
            protocol=protocol,
            credentials=StoreCredentials(directory=directory) if directory else None,
            ca_file=authority,
            region=region,
        )
    except LocationError as err:
        fail(f"--storage: {err}", status=2)
    return (named, *stores)


def _of_router(file: Path) -> tuple[StoreLocation, ...]:
    """Every external store of a router's file, once."""
    try:
        config = load_router_config(file)
        stores = [config.disaggregated_serving.default_external_storage]
        stores += [backend.external_storage for backend in config.backends]
        named = dict.fromkeys(store for store in stores if store is not None)
        locations = tuple(map(_location, named))
    except (DocumentError, LocationError) as err:
        fail(f"--router-file: {err}", status=2)
    if not locations:
        fail(f"--router-file: {file} names no external_storage", status=2)
    return locations


def _location(store: ExternalStorage) -> StoreLocation:
    keys = store.credentials
    credentials = (
        StoreCredentials(Secret(keys.access_key), Secret(keys.secret_key)) if keys else None
    )
    return store_location(
        store.endpoint, store.kv_namespace, protocol=store.protocol, credentials=credentials
    )
