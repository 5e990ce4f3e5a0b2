"""Names of vLLM's connector for KV in external storage.

vLLM imports CONNECTOR from MODULE_PATH. docs/run/storage.md documents the configuration, whose
keys for the store are also those of the torch engine's `--kv-storage-config`. The operator writes
both.
"""

from collections.abc import Mapping
from typing import Final

CONNECTOR: Final = "TandemStorageConnector"
"""`kv_connector`. Written by users, read by vLLM."""
MODULE_PATH: Final = "tandem_vllm_storage.connector"
"""`kv_connector_module_path`, beside CONNECTOR."""
LOAD_FAILURE_POLICY: Final = "recompute"
"""`kv_load_failure_policy` that the connector requires. vLLM's default fails a request if its load
fails."""
PACKAGES_PATH: Final = "/opt/tandem/python"
"""Directory that the init container's entrypoint fills (images/tandem-vllm-storage.Dockerfile), and
that `PYTHONPATH` of the engine's container names."""

# Keys of a store, in `kv_connector_extra_config` and in `--kv-storage-config`.
ENDPOINT: Final = "endpoint"
"""URL of the store: http://, https:// or file:///."""
KV_NAMESPACE: Final = "kv_namespace"
PROTOCOL: Final = "protocol"
"""s3, http or file; left out, endpoint and credentials select it."""
REGION: Final = "region"
"""Region of an S3 store; left out, us-east-1."""
CREDENTIALS_DIR: Final = "credentials_dir"
"""Mounted Secret with the files access_key, secret_key and, optionally, session_token."""
BOUNDS_FILE: Final = "bounds_file"
"""JSON file with CAPACITY and MAX_AGE, read again while the engine runs; it overrides the settings
of the same names. Written by the kubelet from the annotation `labels.STORAGE_BOUNDS`."""
CAPACITY: Final = "capacity_bytes"
"""Most bytes of the namespace; left out or 0: no limit."""
MAX_AGE: Final = "max_age_seconds"
"""Seconds since its last use after which a chunk is deleted."""
CHUNK_TOKENS: Final = "chunk_tokens"
"""Tokens of a stored chunk."""
WEIGHTS: Final = "weights"
"""Commit or digest of the weights; only vLLM's connector has this key."""
_SETTINGS: Final = (
    ENDPOINT, KV_NAMESPACE, PROTOCOL, REGION, CREDENTIALS_DIR, BOUNDS_FILE, CAPACITY, MAX_AGE,
    CHUNK_TOKENS, "virtual_host_style", "ca_file", "pending_bytes",
)  # fmt: skip
SETTINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "vllm": (*_SETTINGS, WEIGHTS),
    "torch": (*_SETTINGS, "host_bytes"),
}
"""All keys that an engine accepts, by its type; with another key it does not start. Read by the
operator."""

# Metrics on the engine's /metrics page. Written by the connector, read by dashboards.
LOADED_TOKENS: Final = "tandem_vllm_storage_loaded_tokens"
STORED_TOKENS: Final = "tandem_vllm_storage_stored_tokens"
LOADED_BYTES: Final = "tandem_vllm_storage_loaded_bytes"
LOAD_SECONDS: Final = "tandem_vllm_storage_load_seconds"
TRANSFER_SECONDS: Final = "tandem_vllm_storage_transfer_seconds"
"""Seconds that a hand-off's look-up and load took on the decode engine. Read by the sidecar and the
router."""
TRANSFER_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2.5, 5, 10)
"""Bounds of TRANSFER_SECONDS; the sidecar's own histogram of transfers has all of them."""
FAILED_TRANSFERS: Final = "tandem_vllm_storage_failed_transfers"
"""Decode legs whose named KV was not loaded as a whole. Read by the sidecar and the router."""
NOT_LOADED_CHUNKS: Final = "tandem_vllm_storage_not_loaded_chunks"
NOT_STORED_CHUNKS: Final = "tandem_vllm_storage_not_stored_chunks"
"""Read by `tandem doctor`."""
BREAKER_STATE: Final = "tandem_vllm_storage_breaker_state"
"""0 closed, 1 half-open, 2 open. Read by the operator and by `tandem doctor`."""
FAILURE: Final = "tandem_vllm_storage_failure"
"""1 for the newest failure of the store, 0 for earlier ones, by the label `message`. Read by the
operator and by `tandem doctor`."""
