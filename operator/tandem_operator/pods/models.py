"""What an engine's `--model` is, where a volume with the model is mounted, and which commit of a
model that was downloaded before its pods they load."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec

from tandem_contract import labels
from tandem_contract.connectors import ConnectorName

from ..resources.pools import Pool, PrefillPool

_MOUNT: Final = "/model"


class ModelDownload(msgspec.Struct, frozen=True):
    """What is downloaded before a pool's pods start."""

    repository: str
    revision: str | None
    """Branch, tag or commit, as in the spec; None: the main branch."""
    claim: str
    """PersistentVolumeClaim of the cache."""

    @property
    def source(self) -> tuple[str, str | None]:
        """What must be one commit in all pods of a set."""
        return self.repository, self.revision


class PulledModel(msgspec.Struct, frozen=True):
    """A download with the commit that its revision was; in pods as annotation PULLED_MODEL."""

    download: ModelDownload
    commit: str


def download_before(pool: Pool) -> ModelDownload | None:
    """What to download before the pods of the pool start; None unless its user asks for it."""
    model = pool.spec.model
    if model.cache is None or not model.cache.pre_pull:
        return None
    return ModelDownload(model_argument(pool), model.revision, model.cache.claim_name)


def at_commit(pool: Pool, commit: str) -> Pool:
    """The pool with a commit as the model's revision. Its hashes stay: they are of the spec."""
    model = msgspec.structs.replace(pool.spec.model, revision=commit)
    # By kind, for the type checker: a pool's spec has the type of its kind.
    if isinstance(pool, PrefillPool):
        return replace(pool, spec=msgspec.structs.replace(pool.spec, model=model))
    return replace(pool, spec=msgspec.structs.replace(pool.spec, model=model))


def with_pulled_model(template: Mapping[str, Any], pulled: PulledModel) -> dict[str, Any]:
    """A pod template with the annotation."""
    metadata = template["metadata"]
    note = {labels.PULLED_MODEL: msgspec.json.encode(pulled).decode()}
    return {
        **template,
        "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), **note}},
    }


def pulled_model(template: Mapping[str, Any]) -> PulledModel | None:
    """The annotation of a pod template; None without one that can be read."""
    annotations = template.get("metadata", {}).get("annotations") or {}
    if (text := annotations.get(labels.PULLED_MODEL)) is None:
        return None
    try:
        return msgspec.json.decode(text, type=PulledModel)
    except (msgspec.DecodeError, TypeError):
        return None


def model_argument(pool: Pool) -> str:
    """The engine's model argument: a directory in the container, a repository, an S3 URI, or
    `tiny:SEED`."""
    source, mount = pool.spec.model.source, model_mount(pool)
    if source.tiny is not None:
        return f"tiny:{source.tiny.seed}"
    if source.path is not None:
        return source.path
    if source.s3 is not None:
        return source.s3.uri
    if (mounted := source.pvc or source.oci) is not None:
        return f"{mount}/{mounted.path}" if mounted.path else mount
    repository = source.huggingface.repository if source.huggingface else None
    return repository or pool.spec.model.name


def model_mount(pool: Pool) -> str:
    """Where the volume with the model is mounted.

    LMCache's server tells models apart by this argument alone, and serves all pools of a node.
    """
    if ConnectorName.LMCACHE_MP in pool.spec.transfer.connector_names:
        return f"{_MOUNT}-{pool.compat}"
    return _MOUNT
