"""`tandem plan`: how right its simulation is, how fast, and what it says of known cases.

    python -m benchmarks.plan [--only NAME] [--json FILE]

`queues`: mean waits of a million requests, beside the formulas of M/D/1 and M/M/c. `speed`: tokens
simulated per second of one core, and whether two runs are the same bit by bit. `published`: steps
that others measured on GPUs, beside rooflines that were calibrated with none of them, and with five
of them. `directions`: what papers found of separate pools. `ratios` and `network`: prefill pods to
decode pods by workload, and the least network by model.
"""

import resource
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from time import process_time
from typing import Final

import click
from rich.console import Console
from rich.table import Table
from tests.planner.simulation.queues import Wait, md1, mmc

from tandem_cli.plan.inputs import read_model, read_workload
from tandem_planner.fabrics import Fabric, least_rate
from tandem_planner.kv_size import kv_size
from tandem_planner.simulation.engine import Batching
from tandem_planner.simulation.measures import Slo
from tandem_planner.simulation.work import Request
from tandem_planner.sizing.deployments import Deployment, Estimate, Pool
from tandem_planner.sizing.gpus import GPUS, Gpu
from tandem_planner.sizing.model_shape import ModelShape, model_shape
from tandem_planner.sizing.search import DECODE, PREFILL, Search, Target, Workload

from .figures import Figure, at_least, at_most, progress, report, without_target
from .plan_published import PUBLISHED, calibrated, error

_OPT_13B: Final = {
    "model_type": "opt", "hidden_size": 5120, "ffn_dim": 20480, "num_hidden_layers": 40,
    "num_attention_heads": 40, "vocab_size": 50272, "torch_dtype": "float16",
    "tie_word_embeddings": True,
}  # fmt: skip
_OPT_66B: Final = {
    **_OPT_13B, "hidden_size": 9216, "ffn_dim": 36864, "num_hidden_layers": 64,
    "num_attention_heads": 72,
}  # fmt: skip
_A10: Final = Gpu(
    "A10 24 GB", 125e12, 0.0, 24e9, 600e9, 0.0, 31.5e9, 12.5e9,
    "NVIDIA A10 data sheet; NIC: 100 Gbit/s",
)  # fmt: skip
_QWEN_7B: Final = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "vocab_size": 152064, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "gptq", "bits": 4},
}  # fmt: skip
_HALVINGS: Final = 8
"""Of the rates from 0.2 to 100 per second: to 3 %."""
_CONTEXT: Final = 8192
"""Tokens of the prompts of the network table."""


def _queues() -> list[Figure]:
    cases: list[tuple[str, Callable[[], Wait]]] = [
        ("M/D/1, ρ = 0.5", lambda: md1(0.5, count=1_000_000)),
        ("M/D/1, ρ = 0.8", lambda: md1(0.8, count=1_000_000)),
        ("M/M/1, ρ = 0.5", lambda: mmc(1, 0.5, count=1_000_000)),
        ("M/M/4, ρ = 0.7", lambda: mmc(4, 0.7, count=1_000_000)),
        ("M/M/16, ρ = 0.8", lambda: mmc(16, 0.8, count=1_000_000)),
    ]
    figures = []
    for name, run in cases:
        progress(name)
        wait = run()
        own = f"{name}: mean wait over that of its own arrivals, error"
        figures += [
            at_most(f"{name}: mean wait, error", abs(wait.simulated / wait.expected - 1), "", 0.02),
            at_most(own, abs(wait.simulated / wait.exact - 1), "", 0.02),
        ]
    return figures


def _speed() -> list[Figure]:
    model, weights = read_model("llama-3.3-70b")
    estimate = Estimate(model, GPUS["h100"], Fabric.RDMA, weights=weights)
    workload = read_workload("chat", seed=0)
    deployments = {
        "co-located": Deployment(Pool(8, 4, Batching(2048, 256))),
        "split": Deployment(Pool(5, 4, DECODE), Pool(3, 4, PREFILL)),
    }
    figures = []
    for name, deployment in deployments.items():
        requests = workload.at(25.0)
        tokens = sum(request.output_tokens for request in requests)
        rates, results = [], []
        for _ in range(5):
            begin = process_time()
            results.append(estimate.serve(deployment, requests, Slo(2.0, 0.05)))
            rates.append(tokens / (process_time() - begin))
        prompts = sum(request.prompt_tokens for request in requests) / tokens
        figures += [
            at_least(f"{name}, 8 pods: tokens of answers simulated", rates, "/s", 1e6),
            without_target(f"{name}: with tokens of prompts", [r * (1 + prompts) for r in rates],
                           "/s"),
            at_most(f"{name}: runs that differ from the first", sum(
                result != results[0] for result in results), "", 0),
        ]  # fmt: skip
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [*figures, without_target("memory at most", peak, "MiB")]


def _published() -> list[Figure]:
    figures = []
    for group in dict.fromkeys(row.group for row in PUBLISHED):
        rows = [row for row in PUBLISHED if row.group == group]
        errors = [abs(error(row)) for row in rows]
        most = 0.35 if "prefill" in group else 0.2
        within = fmean(row.is_within for row in rows)
        figures += [
            at_most(f"{group}: not calibrated, mean error", fmean(errors), "", most),
            without_target(f"{group}: rows", len(rows), ""),
            at_least(f"{group}: share of the rows within bounds", within, "", 0.9),
        ]
        if len(rows) > 10:
            step, others = calibrated(rows)
            left = [abs(error(row, step)) for row in others]
            figures.append(
                at_most(
                    f"{group}: calibrated with five rows, the others", fmean(left), "", 0.6 * most
                )
            )
    return figures


def _requests(prompt: float, output: float, spread: float, count: int, seed: int) -> Workload:
    """Poisson arrivals, lognormal lengths of these medians."""
    random, at, requests = Random(seed), 0.0, []
    for _ in range(count):
        at += random.expovariate(1.0)
        lengths = (
            min(2000, 1 + int(median * random.lognormvariate(0, spread)))
            for median in (prompt, output)
        )
        requests.append(Request(at, *lengths))
    return Workload(requests)


def _directions() -> list[Figure]:
    """DistServe (Zhong and others, OSDI 2024, on A100s): rate of separate pools over that of
    co-located ones which compute whole prompts, as vLLM did then. Mooncake's connector: one A10
    for each role, over two plain engines (Qwen2.5 7B in 4 bits)."""
    chat = _requests(300, 200, 0.9, 4000, 1)
    papers = _requests(1700, 100, 0.1, 4000, 1)
    figures = []
    for name, config, workload, gpus, slo in (
        ("OPT-13B, chat, 0.25 s/0.1 s", _OPT_13B, chat, 8, Slo(0.25, 0.1)),
        ("OPT-66B, summaries, 15 s/0.15 s", _OPT_66B, papers, 16, Slo(15.0, 0.15)),
        ("OPT-66B, summaries, 15 s/0.05 s", _OPT_66B, papers, 16, Slo(15.0, 0.05)),
    ):
        progress(name)
        estimate = Estimate(model_shape(config), GPUS["a100"], Fabric.NVLINK)
        search = Search(estimate, workload, Target(slo))
        whole = Batching(2048, 256, is_chunked=False)
        plain = max(
            search.highest(Deployment(Pool(gpus // t, t, whole)), 0.2, 100.0, _HALVINGS)
            for t in estimate.tensor_sizes(whole, workload.longest)
        )
        plans = search.most(gpus)
        split = max(plan.rate for plan in plans if plan.deployment.prefill)
        chunked = max(plan.rate for plan in plans if not plan.deployment.prefill)
        figures += [
            at_least(f"{name}: rate, split over plain", split / plain, "×", 1),
            without_target(f"{name}: split over chunks", split / chunked, "×"),
        ]
    qwen = Estimate(model_shape(_QWEN_7B), _A10, Fabric.TCP)
    long = _requests(1800, 100, 0.2, 600, 2)
    one_each = Deployment(Pool(1, 1, DECODE), Pool(1, 1, PREFILL))
    two = Deployment(Pool(2, 1, Batching(2048, 256, is_chunked=False)))
    served = [qwen.serve(each, long.at(1.5), Slo()).measures for each in (one_each, two)]
    worse = served[0].ttft_p50 / served[1].ttft_p50
    better = served[1].gap_p99 / served[0].gap_p99
    return [
        *figures,
        at_least("A10: TTFT p50, 1P1D over two plain engines", worse, "×", 1),
        at_least("A10: p99 gap, two plain engines over 1P1D", better, "×", 1),
    ]


def _ratios() -> list[Figure]:
    cases = {
        "chat": ("chat", None, None),
        "chat, prompts of 200 and answers of 800 tokens": ("chat", 200, 800),
        "rag": ("rag", None, None),
        "rag, nothing cached": ("rag", None, None),
        "code": ("code", None, None),
        "batch": ("batch", None, None),
    }
    figures = []
    for model, gpu, tensor in (("llama-3.1-8b", "h100", 1), ("llama-3.3-70b", "h100", 4)):
        shape, weights = read_model(model)
        kind = Deployment(Pool(1, tensor, DECODE), Pool(1, tensor, PREFILL))
        for name, (preset, prompt, output) in cases.items():
            workload = read_workload(preset, prompt_tokens=prompt, output_tokens=output, seed=0)
            if "nothing" in name:
                workload = Workload([request._replace(blocks=()) for request in workload.requests])
            progress(f"{model}, {name}")
            estimate = Estimate(shape, GPUS[gpu], Fabric.RDMA, weights=weights)
            prefill, decode = Search(estimate, workload, Target(Slo(2.0, 0.05))).capacities(kind)
            figures.append(
                without_target(
                    f"{model}, {name}: prefill pods per decode pod",
                    decode / prefill if prefill else 0.0, "",
                )
            )  # fmt: skip
    return figures


def _network() -> list[Figure]:
    cases: Sequence[tuple[str, str, int, str]] = (
        ("llama-3.1-8b", "h100", 1, "auto"),
        ("llama-3.3-70b", "h100", 4, "auto"),
        ("llama-3.3-70b", "h100", 4, "fp8"),
        ("qwen3-235b-a22b", "h200", 8, "auto"),
        ("deepseek-v3", "h200", 8, "auto"),
    )
    table = Table("model", "KV", "pods", "KV of 8,192 tokens", "read", "prefill", "least network")
    for model, gpu, tensor, dtype in cases:
        shape, _ = read_model(model)
        estimate = replace(Estimate(shape, GPUS[gpu], Fabric.RDMA), cache_dtype=dtype)
        read = estimate.kv_size(tensor).bytes(_CONTEXT)
        seconds = estimate.prompt_seconds(Pool(1, tensor, PREFILL), _CONTEXT)
        table.add_row(
            model, dtype, f"{tensor} × {GPUS[gpu].title}", _giga(_once(shape, dtype)), _giga(read),
            f"{seconds:.2g} s", f"{8e-9 * least_rate(read, seconds):.0f} Gbit/s",
        )  # fmt: skip
    Console(width=130).print(table)
    return []


def _once(shape: ModelShape, dtype: str) -> float:
    return kv_size(shape.kv, dtype).bytes(_CONTEXT)


def _giga(size: float) -> str:
    return f"{size / 1e9:.2g} GB"


_EXPERIMENTS: Final = {
    "queues": _queues,
    "speed": _speed,
    "published": _published,
    "directions": _directions,
    "ratios": _ratios,
    "network": _network,
}


@click.command()
@click.option("--only", type=click.Choice(list(_EXPERIMENTS)), help="run this experiment alone")
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
def main(*, only: str | None, file: Path | None) -> None:
    """Measure the planner's simulation; needs no GPU."""
    names = [only] if only else list(_EXPERIMENTS)
    report([figure for name in names for figure in _EXPERIMENTS[name]()], file)


if __name__ == "__main__":
    main()
