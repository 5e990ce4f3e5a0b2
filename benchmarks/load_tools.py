"""The load generators that `benchmarks.loadtest` compares: how each is run and what it reports.

Each peer is in an environment of its own and runs with the flags that its documentation gives for
the same load, with one process that sends. None of them fetches anything from the Hugging Face hub:
all get the directory of a tokenizer.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from . import load_reports
from .load_reports import Reported

_ROOT: Final = Path(__file__).parent.parent
_BIN: Final = Path(sys.executable).parent
# vLLM's CPU build has another distribution name, for which its console program does not start; the
# functions are those that the program calls.
_VLLM_BENCH_SERVE: Final = (
    "import argparse\n"
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "parser = argparse.ArgumentParser()\n"
    "add_cli_args(parser)\n"
    "main(parser.parse_args())\n"
)


class NotInstalled(RuntimeError):
    """The message says which environment is missing and how to create it."""


@dataclass(frozen=True, slots=True)
class Load:
    """A number of equal chat requests."""

    url: str
    requests: int
    tokenizer: Path
    """Directory of a Hugging Face tokenizer."""
    rate: float | None = None
    """Requests per second at equal distances; None: closed loop of `clients`."""
    clients: int = 32
    """Of closed loop: requests at a time."""
    stream: bool = True
    prompt_tokens: int = 64
    output_tokens: int = 16


@dataclass(frozen=True, slots=True)
class Tool:
    """A load generator."""

    name: str
    program: Path
    install: str
    """The command that creates its environment."""
    arguments: Callable[[Load, Path], list[str]]
    """The arguments for a load; reports are written to the directory."""
    report: Callable[[Path], Reported]
    """What it reported into the directory."""
    environment: Mapping[str, str] = field(default_factory=dict)

    def find(self) -> Path:
        """Its program. Raises NotInstalled."""
        if not self.program.exists():
            raise NotInstalled(f"{self.name} is not installed: {self.install}")
        return self.program


def _tandem(load: Load, directory: Path) -> list[str]:
    pace = (
        ["--concurrency", str(load.clients)]
        if load.rate is None
        else ["--rate", f"{load.rate:g}", "--arrivals", "constant"]
    )
    return [
        *("bench", load.url, "--model", "bench", "--endpoint", "chat"),
        "--stream" if load.stream else "--no-stream",
        *("--limit", str(load.requests), *pace, "--warm-up", "0"),
        *("--tokenizer", str(load.tokenizer), "--processes", "1"),
        *("--prompt-tokens", str(load.prompt_tokens)),
        *("--output-tokens", str(load.output_tokens)),
        *("--json", str(directory / "report.json")),
    ]


def _vllm(load: Load, directory: Path) -> list[str]:
    # All of its chat and completion requests are streamed; embeddings are what it does not stream.
    api = (
        ("openai-chat", "chat/completions") if load.stream else ("openai-embeddings", "embeddings")
    )
    pace = (
        ["--max-concurrency", str(load.clients)]
        if load.rate is None
        else ["--request-rate", f"{load.rate:g}", "--burstiness", "inf"]
    )
    return [
        *("-c", _VLLM_BENCH_SERVE, "--base-url", load.url, "--model", "bench"),
        *("--backend", api[0], "--endpoint", f"/v1/{api[1]}"),
        *("--tokenizer", str(load.tokenizer), "--dataset-name", "random", "--ignore-eos"),
        *("--random-input-len", str(load.prompt_tokens)),
        *("--random-output-len", str(load.output_tokens)),
        *("--num-prompts", str(load.requests), *pace),
        *("--ready-check-timeout-sec", "0", "--disable-tqdm", "--metric-percentiles", "50,95,99"),
        *("--save-result", "--result-filename", str(directory / "report.json")),
    ]


def _guidellm(load: Load, directory: Path) -> list[str]:
    profile = (
        f"kind=concurrent,streams={load.clients}"
        if load.rate is None
        else f"kind=constant,rate={load.rate:g}"
    )
    stream = str(load.stream).lower()
    lengths = f"prompt_tokens={load.prompt_tokens},output_tokens={load.output_tokens}"
    return [
        *("run", "--disable-console", "--profile", profile),
        *("--backend", f"kind=openai_http,target={load.url},model=bench,stream={stream}"),
        *("--constraint", f"kind=max_requests,count={load.requests}"),
        *("--tokenizer", f"kind=huggingface_auto,model={load.tokenizer}"),
        *("--data", f"kind=synthetic_text,{lengths}"),
        # Without the text of every request in the report: that is its cheapest form.
        *("--metrics", "kind=generative,sample_size=0"),
        *("--output", f"kind=json,path={directory / 'report.json'}"),
    ]


def _aiperf(load: Load, directory: Path) -> list[str]:
    pace = (
        ["--concurrency", str(load.clients)]
        if load.rate is None
        else ["--request-rate", f"{load.rate:g}", "--arrival-pattern", "constant"]
    )
    return [
        *("profile", "--model", "bench", "--url", load.url, "--endpoint-type", "chat"),
        *(["--streaming"] if load.stream else []),
        *("--tokenizer", str(load.tokenizer), "--use-server-token-count"),
        *("--isl", str(load.prompt_tokens), "--osl", str(load.output_tokens)),
        *("--request-count", str(load.requests), *pace),
        *("--workers-max", "1", "--record-processor-service-count", "1"),
        *("--ui-type", "none", "--no-gpu-telemetry", "--no-server-metrics"),
        *("--export-level", "summary", "--artifact-dir", str(directory)),
    ]


_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
# aiperf looks for a tokenizer's directory in the hub's cache when HF_HUB_OFFLINE is set. Nothing
# listens at this address: a request to the hub would fail.
_NO_HUB: Final = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_DISABLE_TELEMETRY": "1"}

TANDEM: Final = Tool("tandem bench", _BIN / "tandem", "make setup", _tandem, load_reports.tandem)
PEERS: Final = (
    Tool(
        "vllm bench serve",
        _ROOT / ".venv-vllm/bin/python",
        "make vllm-setup",
        _vllm,
        load_reports.vllm,
        _OFFLINE,
    ),
    Tool(
        "guidellm",
        _ROOT / ".venv-guidellm/bin/guidellm",
        "make load-peers",
        _guidellm,
        load_reports.guidellm,
        {**_OFFLINE, "GUIDELLM__MAX_WORKER_PROCESSES": "1"},
    ),
    Tool(
        "aiperf",
        _ROOT / ".venv-aiperf/bin/aiperf",
        "make load-peers",
        _aiperf,
        load_reports.aiperf,
        _NO_HUB,
    ),
)
TOOLS: Final = (TANDEM, *PEERS)
