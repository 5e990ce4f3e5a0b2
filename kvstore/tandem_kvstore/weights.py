"""The hash of a model's weights. It covers every byte, so no two models share keys.

Hashing takes about a second per gigabyte, so the digest of each file is cached, by path, size,
modification time, change time and inode: a file that is written again is hashed again, also by a
tool that keeps its size and sets its modification time back.
"""

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_SCHEME = "sha256"


def weights_hash(files: Sequence[Path], cache: Path | None = None) -> str:
    """SHA-256 over the contents of `files`, in the order of their names, 64 hexadecimal digits.

    `cache`: directory of the cached digests; None: `~/.cache/tandem/weights`. Blocks while it reads
    the files. Raises OSError when one cannot be read.
    """
    cache = cache or _default_cache()
    total = hashlib.sha256()
    for file in sorted(files, key=lambda path: path.name):
        total.update(_file_digest(file, cache))
    return total.hexdigest()


def file_version(status: os.stat_result) -> tuple[int, ...]:
    """Differs when the file was written again. Not the modification time alone: tools that unpack
    or copy files set it, but none can set the time of the last change."""
    return (
        *(status.st_size, status.st_mtime_ns, status.st_ctime_ns),
        *(status.st_ino, status.st_dev),
    )


def _file_digest(file: Path, cache: Path | None) -> bytes:
    status = file.stat()
    state = (_SCHEME, str(file.resolve()), *file_version(status))
    name = hashlib.sha256(repr(state).encode()).hexdigest()
    if cache is not None:
        with suppress(OSError, ValueError):
            if len(digest := bytes.fromhex((cache / name).read_text())) == 32:
                return digest
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, _SCHEME).digest()
    # The digest of a file that changed while it was read must not be cached.
    if cache is not None and file_version(file.stat()) == file_version(status):
        # A cache that cannot be written only costs time at the next start.
        with suppress(OSError):
            cache.mkdir(parents=True, exist_ok=True)
            temporary = cache / f"{name}.{os.getpid()}"
            temporary.write_text(digest.hex())
            temporary.rename(cache / name)
    return digest


def _default_cache() -> Path | None:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "tandem" / "weights"
    except RuntimeError:
        # A user without a home directory, as in many containers: nothing is cached.
        return None
