"""Simulated pods: a model of about 8 billion parameters on one GPU each."""

from collections.abc import Sequence
from random import Random
from typing import Final

from tandem_planner.kv_size import KvSize
from tandem_planner.simulation.engine import BATCHING, Engine
from tandem_planner.simulation.link import Link
from tandem_planner.simulation.store import KV_BYTES
from tandem_planner.step_cost import LinearStep
from tandem_planner.transfer import TransferCost

SPEED: Final = LinearStep(
    fixed=0.008,
    per_decode=0.0001,
    per_context=2e-8,
    # 10,000 prompt tokens per second at a prompt's start, half of that at position 200,000.
    per_token=1e-4,
    per_pair=2.5e-10,
)
"""A router learns of it only through what it observes."""
BUDGET: Final = BATCHING.budget
"""Tokens per step."""
CACHE_TOKENS: Final = 1_000_000
"""Tokens of KV that a pod holds, cached or in use."""
TRANSFER: Final = TransferCost(latency=0.0, per_byte=1 / 5e9)
"""Of KV that a decode pod reads from prefill pods."""


def engines(
    count: int, seed: int, *, cache_tokens: int = CACHE_TOKENS, decodes: Sequence[int] = ()
) -> list[Engine]:
    """`count` pods whose rates of prefill and decode differ by up to ±30 %, independently.
    `decodes`: indexes of those that get KV from the others."""
    random = Random(seed)
    pods = []
    for i in range(count):
        decode = SPEED.times(random.uniform(0.7, 1.3))
        prefill = SPEED.times(random.uniform(0.7, 1.3))
        speed = decode._replace(per_token=prefill.per_token, per_pair=prefill.per_pair)
        pods.append(Engine(speed, cache_tokens=cache_tokens, seed=seed * 1000 + i))
    connect(pods, decodes)
    return pods


def connect(pods: Sequence[Engine], decodes: Sequence[int]) -> None:
    """The `decodes` among `pods` get KV from the others."""
    for pod in decodes:
        pods[pod].link = Link(TRANSFER, KvSize(KV_BYTES))


def speed_of(pod: Engine) -> LinearStep:
    """The pod's speed, which here always has this form."""
    assert isinstance(pod.speed, LinearStep)
    return pod.speed
