"""The path of a vLLM user: `tandem up` with the example and their own vLLM, then a request."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tandem_contract import headers
from tandem_contract.documents import load_documents

from .engines import STARTS_WITHIN, VENV
from .pairs import until
from .storage import data_objects

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(STARTS_WITHIN + 120)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm-cpu.yaml"
TANDEM = Path(sys.executable).with_name("tandem")
LONG = "once upon a time " * 120


def example(directory: Path, model: Path) -> Path:
    """The example file with a local model."""
    pools: list[dict[str, Any]] = [document.data for document in load_documents(EXAMPLE)]
    pools[0]["spec"]["model"] |= {"source": {"path": str(model)}}
    # The init container links the connector's packages, and the store is beside the hand-off.
    storage = {"endpoint": f"file://{directory / 'store'}", "image": "registry/storage:1"}
    pools[0]["spec"].setdefault("transfer", {})["storage"] = storage
    file = directory / "vllm.yaml"
    file.write_text("\n---\n".join(map(json.dumps, pools)))
    return file


@asynccontextmanager
async def up(directory: Path, model: Path) -> AsyncIterator[str]:
    """Run a stack and yield its endpoint."""
    process = await asyncio.create_subprocess_exec(
        *(TANDEM, "up", "-f", example(directory, model), "--port", "0"),
        *("--program", f"vllm={VENV}/bin/vllm", "--run-dir", directory / "run"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        output = ""
        async with asyncio.timeout(STARTS_WITHIN):
            while "Serving at" not in output:
                line = (await process.stdout.readline()).decode()
                assert line, f"it ended: {output}"
                output += line
        yield output.partition("Serving at ")[2].partition(";")[0]
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


async def tandem(*arguments: str | Path) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        TANDEM, *map(str, arguments), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    return process.returncode, out.decode()


async def test_your_own_vllm_hands_off_stores_kv_and_passes_doctor(
    tmp_path: Path, model: Path
) -> None:

    async def is_stored() -> bool:
        return bool(data_objects(tmp_path / "store"))

    async with up(tmp_path, model) as endpoint, aiohttp.ClientSession() as http:
        body = {"model": "qwen3-0.6b", "prompt": LONG, "max_tokens": 8, "temperature": 0}
        async with http.post(f"{endpoint}/completions", json=body) as answer:
            text = (await answer.json())["choices"][0]["text"]
            assert answer.status == 200
            assert answer.headers[headers.ROUTING_PATH] == "prefill_then_decode"
            ident = answer.headers[headers.REQUEST_ID]
        async with http.post(f"{endpoint}/completions", json=body) as answer:
            assert (await answer.json())["choices"][0]["text"] == text

        # The example shows a hand-off with the first, short request.
        hello = {"model": "qwen3-0.6b", "prompt": "Hello!", "max_tokens": 8}
        async with http.post(f"{endpoint}/completions", json=hello) as answer:
            assert answer.headers[headers.ROUTING_PATH] == "prefill_then_decode"

        # Either engine stores the chunks of the prompt.
        await until(is_stored, STARTS_WITHIN)

        code, story = await tandem("trace", ident, "--run-dir", tmp_path / "run")
        assert code == 0
        assert "prefill_then_decode" in story
        assert "KV transfer, not reported by the engine: at most" in story

        code, output = await tandem("doctor", "--json", "--run-dir", tmp_path / "run")
        findings = json.loads(output)["findings"]
        assert code == 0, findings
        assert [f["seen"] for f in findings if f["check"] == "compatible"] == [
            "everything that a hand-off compares is equal"
        ]
        for check in ("side channel", "data ports"):
            assert [f["severity"] for f in findings if f["check"] == check] == ["ok", "ok"]
        assert all("listens at 20" in f["seen"] for f in findings if f["check"] == "data ports")
