"""What an engine's `--model` is, and where a volume with the model is mounted."""

from typing import Final

from tandem_contract.connectors import ConnectorName

from ..resources.pools import Pool

_MOUNT: Final = "/model"


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
