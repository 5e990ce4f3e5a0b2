"""The init container's packages beside real vLLM: what an engine imports, and from where."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tandem_contract import vllm_storage

from ..images.dockerfile import ROOT, build_packages
from .engines import VENV

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

_IMPORT = f"""
import json, sys
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
config = KVTransferConfig(
    kv_connector="{vllm_storage.CONNECTOR}",
    kv_connector_module_path="{vllm_storage.MODULE_PATH}",
    kv_role="kv_both",
)
connector = KVConnectorFactory.get_connector_class(config)
# What opens the store, and what runs behind vLLM's offloading.
import tandem_kvstore.stores.s3, tandem_vllm_storage.secondary_tier
print(json.dumps({{
    "class": connector.__module__ + "." + connector.__name__,
    "path": sys.path,
    "files": [
        file for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))
    ],
}}))
"""


def test_vllm_loads_the_connector_from_the_image_and_nothing_else_of_ours(tmp_path: Path) -> None:
    packages = build_packages(tmp_path / "packages", "--python", str(VENV / "bin/python"))
    completed = subprocess.run(
        [VENV / "bin/python", "-c", _IMPORT],
        # No variable of this process: the engine's container has none of it.
        env={
            "PATH": os.defpath,
            "HOME": str(tmp_path),
            "PYTHONPATH": str(packages),
            "VLLM_LOGGING_LEVEL": "ERROR",
        },
        cwd=tmp_path,
        capture_output=True,
        check=False,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr
    loaded = json.loads(completed.stdout.splitlines()[-1])
    assert loaded["class"] == f"{vllm_storage.MODULE_PATH}.{vllm_storage.CONNECTOR}"
    ours = [file for file in loaded["files"] if file.startswith(str(packages))]
    assert {Path(file).relative_to(packages).parts[0] for file in ours} == {
        "tandem_contract", "tandem_kvstore", "tandem_vllm_storage", "xxhash", "obstore",
    }  # fmt: skip
    # vLLM's environment may be a link into another checkout.
    checkout = (str(ROOT), str(VENV.resolve().parent))
    own = (str(VENV), str(VENV.resolve()))
    assert [
        file
        for file in (*loaded["files"], *loaded["path"])
        if file.startswith(checkout) and not file.startswith(own)
    ] == []
