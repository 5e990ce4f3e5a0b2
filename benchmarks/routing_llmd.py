"""llm-d's own EPP on the simulated pods, beside the policy rebuilt from its source.

    TANDEM_LLMD_BIN=DIR python -m benchmarks.routing --only llmd-real [--trace FILE]

The folder has the program `epp` of llm-d-router (docs/project/testing.md). Both get the same
requests, one run after the other. While the EPP runs, the rebuilt policy is asked about each
request too, and told of the EPP's choice.
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.epp.simulation.llmd_epp import LlmdEpp
from tests.epp.simulation.llmd_policy import LlmdDefault, LlmdSettings
from tests.epp.simulation.regimes import REGIMES
from tests.llmd.programs import FOLDER

from tandem_planner.simulation.loop import simulate

from .figures import Figure, progress, without_target
from .routing_load import Load
from .routing_rivals import UNIFIED, Row, row_text, summarize

_PENALTIES: Final = (18.0, 1.0)
"""maxTTFTPenaltyMs, in seconds: llm-d's default, and one that requests meet often."""


def compare_with_real(load: Load) -> list[Figure]:
    """Figures of the EPP over those of the rebuilt policy; none without the program."""
    program = Path(os.environ.get(FOLDER, "/nonexistent")) / "epp"
    if not os.access(program, os.X_OK):
        progress(f"llm-d's EPP is left out: set {FOLDER} to a folder with its program epp")
        return []
    figures = []
    for penalty in _PENALTIES:
        settings = LlmdSettings(penalty=penalty)
        rows, agreement = _run(load, settings, program)
        for name, row in rows.items():
            progress(f"  {name}, {penalty:g} s: {row_text(row)}")
        figures += _figures(f"llm-d's EPP, {penalty:g} s: {{}}", rows, agreement)
    return figures


def _run(load: Load, settings: LlmdSettings, program: Path) -> tuple[Mapping[str, Row], float]:
    requests, regime = load.requests(0), REGIMES[load.regime]
    pods = regime.pods(0)
    rebuilt = simulate(requests, pods, LlmdDefault(pods, 0, settings=settings))
    pods = regime.pods(0)
    with tempfile.TemporaryDirectory() as folder:
        router = LlmdEpp(pods, 0, program=program, directory=Path(folder), settings=settings)
        try:
            real = simulate(requests, pods, router)
        finally:
            router.close()
    rows = {
        "rebuilt": summarize(rebuilt, UNIFIED.slos),
        "its own EPP": summarize(real, UNIFIED.slos),
    }
    return rows, router.agreement


def _figures(name: str, rows: Mapping[str, Row], agreement: float) -> list[Figure]:
    real, rebuilt = rows["its own EPP"], rows["rebuilt"]
    ratios = {
        "mean TTFT": real.ttft_mean / rebuilt.ttft_mean,
        "p99 TTFT": real.ttft / rebuilt.ttft,
        "p99 ITL": real.itl / rebuilt.itl,
        **{
            f"{slo.text} goodput": real.goodput[i] / rebuilt.goodput[i]
            for i, slo in enumerate(UNIFIED.slos)
        },
    }
    return [
        without_target(
            name.format("choices that the rebuilt policy may make too"), agreement, "share"
        ),
        *(
            without_target(name.format(f"{what}, over the rebuilt policy's"), ratio, "ratio")
            for what, ratio in ratios.items()
        ),
    ]
