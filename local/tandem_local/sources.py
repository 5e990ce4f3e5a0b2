"""The files that `-f` names.

Errors: `DocumentError`, with file and line.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from tandem_contract.documents import DocumentError, load_documents
from tandem_operator.resources.pool_files import parse_pools
from tandem_operator.resources.pools import Pools


def read_sets(paths: Sequence[Path]) -> Pools:
    """The sets of pools in files, and in the `*.yaml` and `*.yml` of directories.

    Raises DocumentError when a file cannot be read, is not YAML, or holds no valid pools, and when
    there is no pool at all.
    """
    files = list(dict.fromkeys(file for path in paths for file in _files(path)))
    sets = parse_pools([document for file in files for document in load_documents(file)])
    if not sets:
        raise DocumentError(f"{', '.join(map(str, paths))}: no PrefillPool or DecodePool in there")
    return sets


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    found = sorted(file for file in path.iterdir() if file.suffix in (".yaml", ".yml"))
    if not found:
        raise DocumentError(f"{path}: no *.yaml or *.yml file in this directory")
    yield from found
