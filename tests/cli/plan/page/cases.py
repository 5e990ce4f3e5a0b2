"""Deployments and workloads for which both simulations must agree."""

from random import Random
from typing import Any

import msgspec

from tandem_cli.plan.inputs import read_model
from tandem_cli.plan.page.data import coefficients
from tandem_planner.sizing.gpus import GPUS
from tandem_planner.sizing.roofline import RooflineStep
from tandem_planner.step_cost import LinearStep, StepCost

Json = dict[str, Any]

STEP = [0.009, 1.5e-5, 5.2e-8, 2.06e-5, 6.6e-10]
"""About Llama 3.1 8B on an H100."""
WORKLOAD: Json = {
    "seed": 1, "rate": 12, "long": 0.25, "longTokens": 3000, "outputTokens": 100, "count": 60,
}  # fmt: skip


def pool(replicas: int = 1, **changes: Any) -> Json:
    return {
        "replicas": replicas, "step": STEP, "budget": 8192, "requests": 256, "isChunked": True,
        "tokens": 400_000,
    } | changes  # fmt: skip


def roofline(model: str, tensor: int, **changes: Any) -> Json:
    """Pods of a model on H200s, whose step is no sum."""
    return pool(**changes) | {"roofline": [model, tensor]} | {
        "step": msgspec.to_builtins(coefficients(_roofline(model, tensor)))
    }  # fmt: skip


def _roofline(model: str, tensor: int) -> RooflineStep:
    return RooflineStep(read_model(model)[0], GPUS["h200"], tensor)


def step_of(kind: Json) -> StepCost:
    """The steps of pods that `pool` or `roofline` made."""
    return _roofline(*kind["roofline"]) if "roofline" in kind else LinearStep(*kind["step"])


def link(rate: float = 40e9, **changes: Any) -> Json:
    return {
        "latency": 0.002, "perByte": 1 / rate, "kv": [131072.0, 0.0, None], "streamed": 0.0,
    } | changes  # fmt: skip


def case(
    decode: Json, prefill: Json | None = None, over: Json | None = None, **changes: Any
) -> Json:
    deployment = {"prefill": prefill, "decode": decode, "link": over}
    return {"deployment": deployment, "workload": WORKLOAD | changes}


CASES: dict[str, Json] = {
    "one pod, whole prompts": case(pool(isChunked=False)),
    "two pods, whole prompts": case(pool(2, isChunked=False), long=0.6),
    "two pods, chunks": case(pool(2, budget=512)),
    "overloaded": case(pool(budget=512), rate=60, long=0.6),
    "few requests in a batch": case(pool(requests=4), long=0.0),
    "1P1D": case(pool(budget=2048), pool(), link()),
    "3P2D, streamed": case(pool(2, budget=2048), pool(3), link(25e9, streamed=1.0), rate=40),
    "a slow fabric": case(pool(budget=2048), pool(), link(1e9), long=0.6),
    "windows": case(pool(2), pool(2), link(1e9, kv=[36864.0, 4718592.0, 18432.0], streamed=0.5)),
    "roofline": case(
        roofline("llama-3.1-8b", 1, budget=2048), roofline("llama-3.1-8b", 1), link()
    ),
    "roofline of experts and windows": case(
        roofline("gpt-oss-120b", 2, replicas=2, budget=1024), rate=30, longTokens=6000
    ),
    "little memory": case(pool(isChunked=False, tokens=7000), long=0.5, outputTokens=800, rate=30),
    "little memory of decode pods": case(
        pool(budget=2048, tokens=6000), pool(2), link(), long=0.3, outputTokens=900, rate=30
    ),
}  # fmt: skip


def random_case(seed: int) -> Json:
    """One of many more."""
    random = Random(seed)

    def any_pool() -> Json:
        return pool(
            random.randint(1, 4),
            step=[value * random.uniform(0.3, 3) for value in STEP],
            budget=random.choice([256, 512, 2048, 8192]),
            requests=random.choice([2, 16, 256]),
            isChunked=random.random() < 0.7,
            tokens=random.choice([9_000, 30_000, 400_000]),
        )

    return case(
        any_pool(),
        random.choice([None, any_pool()]),
        link(
            10 ** random.uniform(9, 11.5),
            streamed=random.choice([0.0, 0.5, 1.0]),
            kv=random.choice([[131072.0, 0.0, None], [36864.0, 4718592.0, 18432.0]]),
        ),
        seed=seed,
        rate=10 ** random.uniform(0, 2),
        long=random.random(),
        longTokens=random.randint(300, 6000),
        outputTokens=random.randint(1, 600),
        count=200,
    )
