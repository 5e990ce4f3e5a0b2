"""Reads the YAML files given with `-f`.

Errors: `DocumentError`, with file and line.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from tandem_contract.documents import Document, DocumentError, load_documents
from tandem_operator.resources.pool_files import parse_pools
from tandem_operator.resources.pools import Pools


def read_pool_sets(paths: Sequence[Path]) -> Pools:
    """The sets of pools in files, and in the `*.yaml` and `*.yml` files of directories.

    Raises DocumentError if a file cannot be read, is not YAML or holds an invalid pool, and if
    there is no pool at all.
    """
    pool_sets = parse_pools(read_documents(paths))
    if not pool_sets:
        raise DocumentError(f"{', '.join(map(str, paths))}: contains no PrefillPool or DecodePool")
    return pool_sets


def read_documents(paths: Sequence[Path]) -> list[Document]:
    """Every YAML document of these files and directories. Raises DocumentError if a file cannot be
    read or is not YAML."""
    # A file that is given twice, by itself and in its directory, is read once.
    files = list(dict.fromkeys(file for path in paths for file in _files(path)))
    return [document for file in files for document in load_documents(file)]


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    files = sorted(file for file in path.iterdir() if file.suffix in (".yaml", ".yml"))
    if not files:
        raise DocumentError(f"{path}: no *.yaml or *.yml file in this directory")
    yield from files
