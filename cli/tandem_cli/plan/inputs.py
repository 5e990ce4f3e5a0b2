"""What the user says, as values: the model, the workload, the objectives.

Errors: `InputError`, one line that says which input is wrong and what to write.
"""

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any, Final

from tandem_contract.durations import parse_duration
from tandem_loadtest.workload.arrivals import start_times
from tandem_loadtest.workload.presets import PRESETS, SessionBuilder
from tandem_loadtest.workload.sessions import Segment
from tandem_loadtest.workload.settings import Arrivals, WorkloadError
from tandem_loadtest.workload.settings import Workload as Settings
from tandem_loadtest.workload.traces import load_trace, pace
from tandem_planner.model_config import UnknownModelConfig
from tandem_planner.simulation.block_pool import BLOCK
from tandem_planner.simulation.measures import Slo
from tandem_planner.simulation.work import Request
from tandem_planner.sizing.model_shape import ModelShape, model_shape
from tandem_planner.sizing.search import Workload

REQUESTS: Final = 6_000
"""Requests of a workload that is made up: a minute at 100 per second."""
_INDEX: Final = "model.safetensors.index.json"


class InputError(ValueError):
    """An input that nothing can be planned with; one line for the user."""


def known_models() -> Mapping[str, Mapping[str, Any]]:
    """Name → config.json, of models that need no file."""
    text = (files(__package__) / "known_models.json").read_text()
    known: Mapping[str, Mapping[str, Any]] = json.loads(text)
    return known


def read_model(model: str) -> tuple[ModelShape, float | None]:
    """The shape of a directory's or file's config.json, or of a known model, and the bytes of its
    weights where an index of them is there. Raises InputError."""
    path = Path(model)
    known = known_models()
    if not path.exists():
        if model.lower() not in known:
            raise InputError(
                f"{model}: no such file or directory, nor one of the models that need none: "
                f"{', '.join(known)}"
            )
        return _shape(model, known[model.lower()]), None
    file = path / "config.json" if path.is_dir() else path
    shape = _shape(str(file), _document(file))
    index = file.parent / _INDEX
    if not index.exists():
        return shape, None
    total = (_document(index).get("metadata") or {}).get("total_size")
    return shape, float(total) if isinstance(total, int) and total > 0 else None


def _shape(name: str, document: Mapping[str, Any]) -> ModelShape:
    try:
        return model_shape(document)
    except UnknownModelConfig as err:
        raise InputError(f"{name}: {err}") from err


def _document(file: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(file.read_bytes())
    except OSError as err:
        raise InputError(f"{file}: cannot read it: {err.strerror}") from err
    except ValueError as err:
        raise InputError(f"{file}: not JSON: {err}") from err
    if not isinstance(document, dict):
        raise InputError(f"{file}: not a JSON object")
    return document


def read_slo(text: str) -> Slo:
    """`ttft=2s,itl=50ms,e2e=30s`, in any order, one at least. Raises InputError."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in ("ttft", "itl", "e2e"):
            raise InputError(f"--slo {text}: write ttft=2s,itl=50ms,e2e=30s, or some of them")
        try:
            limits[name] = parse_duration(value)
        except ValueError as err:
            raise InputError(f"--slo {text}: {name}: {err}") from err
        if limits[name] <= 0:
            raise InputError(f"--slo {text}: {name} must be above 0")
    return Slo(**limits)


def read_workload(
    name: str,
    *,
    prompt_tokens: int | None = None,
    output_tokens: int | None = None,
    long: float | None = None,
    seed: int = 0,
) -> Workload:
    """A preset of `tandem bench`, or a trace's file. Raises InputError."""
    try:
        if name in PRESETS:
            settings = Settings(
                preset=name, prompt_tokens=prompt_tokens, output_tokens=output_tokens, long=long
            )
            return Workload(list(_preset_requests(settings, seed)))
        if not Path(name).exists():
            raise InputError(
                f"--workload {name}: neither a file nor one of {', '.join(sorted(PRESETS))}"
            )
        if prompt_tokens or output_tokens or long is not None:
            raise InputError(
                f"--workload {name}: a trace has lengths of its own: leave out --prompt-tokens, "
                "--output-tokens and --long"
            )
        return Workload(_trace_requests(Path(name)))
    except WorkloadError as err:
        raise InputError(f"--workload {name}: {err}") from err


def _preset_requests(settings: Settings, seed: int) -> Iterator[Request]:
    if PRESETS[settings.preset].turns > 1:
        raise InputError(
            f"--workload {settings.preset}: conversations of several turns are not simulated: "
            "record a trace of them"
        )
    builder, blocks = SessionBuilder(settings, seed), _Blocks()
    times = start_times(Arrivals(process="poisson", rate=1.0), seed=seed)
    for index, at in zip(range(REQUESTS), times, strict=False):
        session = builder.session(index, at)
        turn = session.turns[0]
        prompt = [*session.system, *turn.prompt]
        segments = [part for part in prompt if isinstance(part, Segment)]
        tokens = sum(segment.tokens for segment in segments)
        yield Request(at or 0.0, tokens, turn.output_tokens, blocks.of(segments))


class _Blocks:
    """Ids of prompts' whole blocks: equal ids, equal text before."""

    def __init__(self) -> None:
        self._ids: dict[tuple[object, ...], int] = {}
        self._next = count()

    def of(self, segments: list[Segment]) -> tuple[int, ...]:
        """Of a prompt. What only one prompt has needs no id, so the last segment gets none."""
        ids: list[int] = []
        before: tuple[object, ...] = ()
        filled = 0
        for segment in segments[:-1]:
            before, filled = (*before, segment.key, segment.tokens), filled + segment.tokens
            while (len(ids) + 1) * BLOCK <= filled:
                key = (*before, len(ids))
                if key not in self._ids:
                    self._ids[key] = next(self._next)
                ids.append(self._ids[key])
        return tuple(ids)


def _trace_requests(file: Path) -> list[Request]:
    arrivals = load_trace(file)
    try:
        factor = pace(arrivals, 1.0)
    except ValueError as err:
        raise InputError(f"{file}: {err}") from err
    return [
        Request(
            arrival.at * factor,
            arrival.prompt_tokens,
            arrival.output_tokens,
            (arrival.prefix_blocks or ())[: arrival.prompt_tokens // BLOCK],
        )
        for arrival in arrivals
    ]
