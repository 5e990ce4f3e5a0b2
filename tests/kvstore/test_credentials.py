"""Keys from a mounted Secret, changed while the store is used."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tandem_kvstore.errors import StoreDenied
from tandem_kvstore.location import StoreCredentials
from tandem_kvstore.stores import open_store, s3

from ..epp.real import until
from .servers import ACCESS_KEY, SECRET_KEY, versitygw

pytestmark = pytest.mark.component


def write_keys(directory: Path, secret: str) -> None:
    """As the kubelet does: the files appear with their new content in one step."""
    fresh = directory.with_name(f"fresh-{len(secret)}")
    fresh.mkdir()
    (fresh / "access_key").write_text(ACCESS_KEY + "\n")
    (fresh / "secret_key").write_text(secret + "\n")
    if directory.exists():
        shutil.rmtree(directory)
    fresh.rename(directory)


async def test_rotated_keys_take_effect_without_a_restart(
    tmp_path: Path, versitygw_program: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "_SECONDS_OF_CREDENTIALS", 0.0)
    write_keys(tmp_path / "secret", "an-old-key-that-was-revoked")
    async with versitygw(tmp_path / "objects") as server:
        credentials = StoreCredentials(directory=tmp_path / "secret")
        store = open_store(replace(server.location, credentials=credentials))
        with pytest.raises(StoreDenied):
            await store.put("object", [b"data"])
        write_keys(tmp_path / "secret", SECRET_KEY)

        async def is_accepted() -> bool:
            try:
                await store.put("object", [b"data"])
            except StoreDenied:
                return False
            return True

        await until(is_accepted)
        assert bytes(await store.get("object", 100)) == b"data"
        # A Secret that vanishes for a moment must not fail requests of a working client.
        shutil.rmtree(tmp_path / "secret")
        assert bytes(await store.get("object", 100)) == b"data"
        await store.close()
