"""What a report says of a run beside its figures."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from .spec import RunSpec


def parameters(spec: RunSpec) -> dict[str, str | int | float | bool | None]:
    """What determines the load; None: not set, or without effect."""
    workload, arrivals = spec.workload, spec.arrivals
    return {
        "workload": workload.preset,
        # Without its directory, which says more of the machine than of the run.
        "file": os.path.basename(workload.file) if workload.file else None,
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "shared": workload.shared,
        "long": workload.long,
        "turns": workload.turns,
        "think": workload.think,
        "models": ", ".join(f"{name}={weight:g}" for name, weight in workload.models.items()),
        "prompts": spec.prompts.style,
        "arrivals": arrivals.process,
        "rate": arrivals.rate,
        "rate_end": arrivals.rate_end,
        "burstiness": arrivals.burstiness if arrivals.process == "gamma" else None,
        "concurrency": arrivals.concurrency,
        "time_factor": arrivals.time_factor if arrivals.process == "trace" else None,
        "limit": spec.limit,
        "duration": spec.duration,
        "max_in_flight": spec.max_in_flight,
        "stream": spec.target.stream,
        "ignore_eos": spec.target.ignore_eos,
        "seed": spec.seed,
    }


def tandem_version() -> str:
    """Version of the installed package; `unknown` for a checkout that is not installed."""
    try:
        return version("tandem-llm")
    except PackageNotFoundError:
        return "unknown"


def machine() -> str:
    """System, architecture and CPUs of this machine."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
