"""Reads archives that the images are written to."""

import json
import tarfile
from pathlib import Path
from typing import Any


def config(archive: Path) -> dict[str, Any]:
    """How a container of the only image in `archive` runs."""
    with tarfile.open(archive) as tar:
        blobs = [opened.read() for member in tar if (opened := tar.extractfile(member))]
    (found,) = (json.loads(blob)["config"] for blob in blobs if blob.startswith(b'{"created"'))
    assert isinstance(found, dict)
    return found
