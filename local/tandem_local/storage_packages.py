"""What the image tandem-vllm-storage does, on this machine: the connector in a directory.

    python -m tandem_local.storage_packages DIRECTORY

The packages are linked from a directory of PYTHONPATH that has the connector, else from the
environment of this process: then vLLM's Python must be of the same minor version, because xxhash is
compiled for one.
"""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Final

PACKAGES: Final = ("tandem_contract", "tandem_kvstore", "tandem_vllm_storage", "xxhash", "obstore")
"""What vLLM's own environment lacks, and nothing more: no other library is to replace vLLM's."""


def link_packages(target: Path, python_path: str) -> None:
    """Link the packages into `target`. `python_path`: as in the variable PYTHONPATH.

    Raises LookupError for a package that is nowhere.
    """
    given = [Path(entry).absolute() for entry in python_path.split(os.pathsep) if entry]
    with_connector = next((entry for entry in given if (entry / PACKAGES[2]).is_dir()), None)
    for name in PACKAGES:
        source = with_connector / name if with_connector else _installed(name)
        if not source.is_dir():
            raise LookupError(f"{source} does not exist: {', '.join(PACKAGES)} must stand together")
        (target / name).symlink_to(source)


def _installed(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise LookupError(f"package {name} is not installed in {sys.prefix}")
    return Path(spec.origin).parent


def main(arguments: list[str]) -> int:
    """Exit status: 1 when a package is missing."""
    try:
        link_packages(Path(arguments[0]), os.environ.get("PYTHONPATH", ""))
    except LookupError as err:
        sys.stderr.write(f"storage_packages: {err}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
