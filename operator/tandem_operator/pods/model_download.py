"""The program of the Job that downloads a model from the Hugging Face hub before the pods start.

    python3 -m tandem_operator.pods.model_download resolve PLAN REPOSITORY REVISION PARTS
    python3 -m tandem_operator.pods.model_download part PLAN REPOSITORY INDEX

`resolve` asks the hub which commit REVISION (empty: the main branch) is, and writes into the file
PLAN which files each part downloads. `part` downloads those of one part into the directory that
HF_HUB_CACHE names; files that are there already cost nothing.

Each writes a JSON report, or what went wrong and the fix, into the container's termination message,
from where the operator reads it: {"commit": …, "bytes": N, "files": N}. `resolve` reports the size
of the whole model, `part` that of its files.
"""

import json
import logging
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tandem_contract.programs import TERMINATED, end_at_sigterm

if __name__ == "__main__":
    # Before the next import, which is slow, and for good: a download goes on in the next pod.
    end_at_sigterm(TERMINATED)

from huggingface_hub import HfApi, errors, hf_hub_download

TERMINATION_LOG: Final = "/dev/termination-log"
"""Kubernetes' default `terminationMessagePath`."""
_MAX_MESSAGE: Final = 1024
"""Characters of an error; the kubelet keeps 4096 bytes of a message."""
_DOWNLOADS: Final = 8
"""Files at the same time, as `snapshot_download` has it."""
_OTHER_FORMATS: Final = (".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth")
"""Weights that vLLM does not load when a repository has safetensors."""

_AUTHORITIES: Final = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
"""Environment variables with the file of the authorities that the hub's library trusts."""

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class File:
    """A file of a repository."""

    name: str
    size: int
    """Bytes."""


def needed_files(files: Sequence[File]) -> list[File]:
    """The files that an engine reads: without weights in other formats beside safetensors."""
    if not any(file.name.endswith(".safetensors") for file in files):
        return list(files)
    return [
        file
        for file in files
        if not file.name.endswith(_OTHER_FORMATS) and not file.name.startswith("original/")
    ]


def split_files(files: Sequence[File], parts: int) -> list[list[File]]:
    """`parts` lists of about the same number of bytes; some are empty when files are few."""
    lists: list[list[File]] = [[] for _ in range(parts)]
    # The largest first, each to the list that has the fewest bytes so far.
    for file in sorted(files, key=lambda file: (-file.size, file.name)):
        min(lists, key=lambda part: sum(each.size for each in part)).append(file)
    return lists


def resolve(plan: Path, repository: str, revision: str, parts: int) -> dict[str, Any]:
    """Write the plan of the parts; returns the report. Raises errors of huggingface_hub."""
    info = HfApi().model_info(repository, revision=revision or None, files_metadata=True)
    files = needed_files([File(each.rfilename, each.size or 0) for each in info.siblings or ()])
    lists = [[asdict(file) for file in part] for part in split_files(files, parts)]
    plan.write_text(json.dumps({"commit": info.sha, "parts": lists}))
    return {"commit": info.sha, **_size(files)}


def download_part(plan: Path, repository: str, index: int) -> dict[str, Any]:
    """Download the files of one part; returns the report. Raises errors of huggingface_hub."""
    content = json.loads(plan.read_text())
    files = [File(**each) for each in content["parts"][index]]

    def download(file: File) -> None:
        hf_hub_download(repository, file.name, revision=content["commit"])
        _log.info("%s: %d bytes", file.name, file.size)

    with ThreadPoolExecutor(_DOWNLOADS) as threads:
        # Collected, so that the first error is raised here.
        list(threads.map(download, files))
    return _size(files)


def explanation(err: Exception, repository: str) -> str:
    """What went wrong, and what the author of the pool does about it."""
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    token, line = "model.source.huggingface.tokenSecretRef", _first_line(err)
    # The order matters: a gated repository is a special case of one that is not found, and the
    # errors of the hub are special cases of OSError.
    if isinstance(err, errors.GatedRepoError):
        return f"{repository} is gated: accept its terms on {hub}, and give that account's {token}"
    if isinstance(err, errors.RevisionNotFoundError):
        return f"{repository} has no such revision: correct model.revision"
    if isinstance(err, errors.RepositoryNotFoundError):
        return (
            f"{hub} has no repository {repository}, or hides it without a token: correct its name,"
            f" or give {token}"
        )
    if isinstance(err, errors.HfHubHTTPError):
        return f"{hub} refused a request about {repository}: {line}"
    if isinstance(err, OSError) and err.errno is not None and err.filename is not None:
        return (
            f"the claim of model.cache cannot take the files: {line}; it needs room for the model,"
            f" and user {os.getuid()} must be able to write it"
        )
    return _why_unreachable(hub, err) or (
        f"cannot download {repository} from {hub}: {line}; let pods of this namespace connect to"
        " it, or set HTTPS_PROXY or HF_ENDPOINT in engine.env"
    )


def _why_unreachable(hub: str, err: Exception) -> str | None:
    for name in _AUTHORITIES:
        if (file := os.environ.get(name)) and not Path(file).exists():
            return f"{name} names {file}, which is not there: mount it with the pool's template"
    if "CERTIFICATE_VERIFY_FAILED" not in str(err):
        return None
    return (
        f"{hub} has a certificate of an authority that is not known here: mount its file with the"
        " pool's template, and name it in SSL_CERT_FILE in engine.env"
    )


def main(arguments: Sequence[str], message: Path) -> int:
    """Run one of the two commands, and write its report or its error to `message`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    command, plan, repository, *rest = arguments
    try:
        if command == "resolve":
            report = resolve(Path(plan), repository, rest[0], int(rest[1]))
        else:
            report = download_part(Path(plan), repository, int(rest[0]))
    except Exception as err:  # noqa: BLE001 - the top of the process
        _log.exception("the download failed")
        message.write_text(explanation(err, repository)[:_MAX_MESSAGE])
        return 1
    message.write_text(json.dumps(report))
    return 0


def _size(files: Sequence[File]) -> dict[str, int]:
    return {"bytes": sum(file.size for file in files), "files": len(files)}


def _first_line(err: Exception) -> str:
    return f"{type(err).__name__}: {str(err).strip().partition(chr(10))[0]}"[:300]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(TERMINATION_LOG)))
