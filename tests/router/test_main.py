"""The command: what it refuses and prints, and how a running one takes a changed file."""

import asyncio
import signal
import sys
from pathlib import Path

import aiohttp
import pytest
import yaml

from tandem_router.configuration import load, log_ignored_storage
from tandem_router.main import SHARED_FLAGS
from tandem_sidecar.main import main as sidecar_command

from ..sidecar.peers import FakeDecode
from .conftest import DECODE
from .processes import COMMAND, router

EXAMPLE = """
disaggregated_serving:
  enabled: true
  prefill_timeout: "30s"
  kv_transfer_timeout: "10s"
  fallback_to_unified: true
  default_external_storage:
    endpoint: "http://storage-cluster:8080"
    kv_namespace: "inference/kv-cache"
    credentials:
      access_key: "${STORAGE_ACCESS_KEY}"
      secret_key: "${STORAGE_SECRET_KEY}"
backends:
  - name: prefill-worker-1
    url: "http://vllm-prefill-1:8000"
    role: prefill
    external_storage:
      endpoint: "http://storage-cluster:8080"
      kv_namespace: "inference/kv-cache"
  - name: decode-worker-1
    url: "http://vllm-decode-1:8000"
    role: decode
    weight: 2
  - name: decode-worker-2
    url: "http://vllm-decode-2:8000"
    role: decode
    weight: 2
  - name: unified-fallback
    url: "http://vllm-unified:8000"
"""
"""The file of the router's document."""


async def command(*arguments: str, **environ: str) -> tuple[int, str, str]:
    """Exit status, output and errors."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, *arguments), stdout=pipe, stderr=pipe, env=environ
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.mark.component
async def test_the_documents_example_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(EXAMPLE)
    secrets = {"STORAGE_ACCESS_KEY": "sesame", "STORAGE_SECRET_KEY": "open"}
    status, out, err = await command("--check-config", str(file), **secrets)
    assert (status, err) == (0, "")
    assert "backend decode-worker-1: decode, http://vllm-decode-1:8000" in out
    assert "backend unified-fallback: unified" in out
    assert "active-request-scorer" in out
    assert "sesame" not in out
    status, _, err = await command("--check-config", str(file))
    assert status == 2
    assert f"{file}:11" in err
    assert "STORAGE_ACCESS_KEY" in err


@pytest.mark.component
async def test_a_field_that_is_not_supported_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("backends:\n- name: d\n  url: http://d:1\n  wieght: 2\n")
    for flag in ("--check-config", "--config"):
        status, _, err = await command(flag, str(file))
        assert status == 2
        assert f"{file}:4" in err
        assert "wieght" in err
    file.write_text("backends:\n- name: d\n  url: http://d:1\n  http2: true\n")
    status, _, err = await command("--check-config", str(file))
    assert (status, f"{file}:4: backends[0].http2: the router calls" in err) == (2, True)


def test_the_shared_flags_are_the_sidecars() -> None:
    assert set(SHARED_FLAGS) <= {flag.name for flag in sidecar_command.params}


def listing(file: Path, name: str, engine: FakeDecode) -> str:
    """The text of a file with one backend."""
    return yaml.safe_dump({"backends": [{"name": name, "url": f"http://{engine.address}"}]})


@pytest.mark.component
@pytest.mark.skipif(sys.platform != "linux", reason="signals of Linux")
async def test_a_changed_file_applies_and_an_unusable_one_does_not(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    async with FakeDecode() as engine, aiohttp.ClientSession() as http:
        file.write_text(listing(file, "first", engine))
        async with router(file) as process:

            async def serving() -> str:
                async with http.post(process.url(), json={"model": "m", "prompt": "Hi"}) as answer:
                    return answer.headers[DECODE]

            assert await serving() == "first"
            # Noticed by itself.
            file.write_text(listing(file, "second", engine))
            await process.wait_for_log("reloaded, 1 backends")
            assert await serving() == "second"
            file.write_text("backends: [{name: third}]\n")
            line = await process.wait_for_log("not reloaded")
            assert f"{file}:1" in line
            assert await serving() == "second"
            # Without waiting for the next look at the file.
            file.write_text(listing(file, "fourth", engine))
            process.process.send_signal(signal.SIGHUP)
            await process.wait_for_log("reloaded, 1 backends")
            assert await serving() == "fourth"
            process.process.send_signal(signal.SIGTERM)
            assert await process.exit_status() == 0


@pytest.mark.parametrize("connector", ["nixl", "storage"])
def test_a_store_that_hands_nothing_off_is_told_with_the_flag(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, connector: str
) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(
        "backends: [{name: d, url: 'http://127.0.0.1:1', "
        "external_storage: {endpoint: 'http://127.0.0.1:2', kv_namespace: n}}]\n"
    )
    log_ignored_storage(load(file, {}), connector)
    says = "start the router with --connector storage" in caplog.text
    assert says == (connector != "storage")
