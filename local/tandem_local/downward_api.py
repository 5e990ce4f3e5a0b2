"""Files of a pod's downwardAPI volumes. Errors: `SetupError`, naming pod, volume and field."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from .errors import SetupError

FIELD: Final = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
"""A `fieldPath` that names one label or annotation."""


def write_files(pod: Mapping[str, Any], volume: Mapping[str, Any], directory: Path) -> None:
    """Write the files of `volume`, a downwardAPI volume of `pod`, into its directory.

    Each file is replaced at once: a reader never sees half of it.
    """
    for path, text in _files(pod, volume):
        file = directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"..{file.name}.partial")
        partial.write_text(text)
        partial.replace(file)


def _files(pod: Mapping[str, Any], volume: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    metadata = pod["metadata"]
    for item in volume["downwardAPI"].get("items") or ():
        field = item["fieldRef"]["fieldPath"]
        if (match := FIELD.fullmatch(field)) is None:
            raise SetupError(
                f"pod {metadata['name']}: volume {volume['name']}: fieldRef {field}: the local "
                "runner supports metadata.labels['KEY'] and metadata.annotations['KEY'] only"
            )
        yield item["path"], str((metadata.get(match[1]) or {}).get(match[2], ""))
