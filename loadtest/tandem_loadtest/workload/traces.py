"""Recorded arrivals: Mooncake JSONL and Azure CSV, scaled to a model, and their sessions.

    arrivals = scale(load_trace(file, limit=200), max_prompt_tokens=1500, max_output_tokens=64)
    session = to_session(arrivals[0], arrivals[0].at)

Errors: `TraceError`, one line: `file:line: what is wrong`.
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fractions import Fraction
from itertools import islice
from math import ceil, floor
from pathlib import Path
from typing import Annotated, Final

import msgspec

from .sessions import Segment, Session, Turn
from .settings import WorkloadError

MOONCAKE_BLOCK: Final = 512
"""Tokens per hash id in Mooncake's traces."""

_AZURE: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_Count = Annotated[int, msgspec.Meta(ge=0)]


class TraceError(WorkloadError):
    """A trace cannot be replayed; the message has file, line, field and cause."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    index: int
    """Position in order of arrival, from 0."""
    at: float
    """Seconds after the first arrival."""
    prompt_tokens: int
    """At least 1."""
    output_tokens: int
    """At least 1."""
    prefix_blocks: tuple[int, ...] | None = None
    """Ids of the prompt's blocks from its start; equal ids, equal tokens. None: not recorded."""
    block_tokens: int = 0
    """Tokens per block; 0 where `prefix_blocks` is None."""


class _Mooncake(msgspec.Struct):
    """One line of Mooncake JSONL; other fields are skipped."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Count
    output_length: _Count
    hash_ids: tuple[_Count, ...]


def load_trace(file: Path, *, limit: int | None = None) -> list[Arrival]:
    """The first `limit` requests of `file` (all without it), in order of arrival.

    The content decides the format: Mooncake's JSON lines or Azure's CSV. A length of 0
    counts as 1, since no engine takes an empty prompt or answers with no token.

    Raises TraceError when the file cannot be read, is empty, is not UTF-8 or of neither format,
    or when a field is missing, of the wrong type or negative.
    """
    lines = _lines(file)
    start = next((i for i, line in enumerate(lines) if line.strip()), None)
    if start is None:
        raise TraceError(f"{file}: is empty: a trace holds at least one request")
    # The first line that is not blank tells the format.
    columns = lines[start].strip().split(",")
    if lines[start].lstrip().startswith("{"):
        rows = _mooncake(file, lines)
    elif any(name in columns for name in _AZURE):
        rows = _azure(file, lines[start:], start)
    else:
        raise TraceError(
            f"{file}:{start + 1}: not a known trace: expected Mooncake JSON lines or a CSV "
            f"with the columns {', '.join(_AZURE)}"
        )
    # Rows need not be in order of arrival.
    arrivals = sorted(islice(rows, limit), key=lambda arrival: arrival.at)
    if not arrivals:
        raise TraceError(f"{file}: holds no request")
    # Times count from the first request: a trace may start in the middle of a day.
    first = arrivals[0].at
    return [replace(a, index=i, at=a.at - first) for i, a in enumerate(arrivals)]


def _lines(file: Path) -> list[str]:
    try:
        data = file.read_bytes()
    except OSError as err:
        raise TraceError(f"{file}: cannot read it: {err.strerror}") from err
    try:
        # Spreadsheet programs write a byte order mark in front of a CSV.
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        line = data[: err.start].count(b"\n") + 1
        raise TraceError(f"{file}:{line}: not UTF-8 (byte {err.start})") from err
    return text.split("\n")


def _mooncake(file: Path, lines: Iterable[str]) -> Iterator[Arrival]:
    decoder = msgspec.json.Decoder(_Mooncake)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except msgspec.ValidationError as err:
            # msgspec ends its message with the path of the wrong field.
            message, _, path = str(err).partition(" - at `$.")
            field = path.rstrip("`")
            raise TraceError(f"{file}:{number}: {field + ': ' if field else ''}{message}") from err
        except msgspec.DecodeError as err:
            raise TraceError(f"{file}:{number}: not JSON: {err}") from err
        yield Arrival(
            index=0,
            at=row.timestamp / 1000,
            prompt_tokens=max(1, row.input_length),
            output_tokens=max(1, row.output_length),
            prefix_blocks=row.hash_ids,
            block_tokens=MOONCAKE_BLOCK,
        )


def _azure(file: Path, lines: Sequence[str], skipped: int) -> Iterator[Arrival]:
    reader = csv.DictReader(lines, strict=True)
    missing = [name for name in _AZURE if name not in (reader.fieldnames or ())]
    if missing:
        raise TraceError(f"{file}:{skipped + 1}: missing column {', '.join(missing)}")
    try:
        for row in reader:
            where = f"{file}:{skipped + reader.line_num}"
            yield Arrival(
                index=0,
                at=_seconds(where, row["TIMESTAMP"]),
                prompt_tokens=max(1, _count(where, "ContextTokens", row["ContextTokens"])),
                output_tokens=max(1, _count(where, "GeneratedTokens", row["GeneratedTokens"])),
            )
    except csv.Error as err:
        raise TraceError(f"{file}:{skipped + reader.reader.line_num}: not CSV: {err}") from err


def _seconds(where: str, text: str | None) -> float:
    try:
        moment = datetime.fromisoformat((text or "").strip())
    except ValueError as err:
        raise TraceError(
            f"{where}: TIMESTAMP: {text!r} is no time: expected YYYY-MM-DD HH:MM:SS.ffffff"
        ) from err
    # Without a zone only differences matter; UTC has no daylight saving time to distort them.
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _count(where: str, field: str, text: str | None) -> int:
    try:
        value = int(text or "")
    except ValueError as err:
        raise TraceError(f"{where}: {field}: {text!r} is not a whole number") from err
    if value < 0:
        raise TraceError(f"{where}: {field}: {value} is negative")
    return value


def scale(
    arrivals: Sequence[Arrival],
    *,
    max_prompt_tokens: int,
    max_output_tokens: int,
    time_factor: float = 1.0,
) -> list[Arrival]:
    """The same arrivals, small enough for a model; lengths only ever shrink.

    With P and O the longest prompt and output, and B the tokens per block:

        b       = floor(B × min(1, max_prompt_tokens / P))     tokens per block, scaled
        prompt' = max(1, floor(prompt × b / B))
        output' = max(1, floor(output × min(1, max_output_tokens / O)))
        at'     = at × time_factor

    Prompts without blocks scale by max_prompt_tokens / P itself. Blocks shrink by the factor that
    prompts shrink by, so prompts that share k whole blocks share exactly k × b tokens.

    Raises ValueError when a maximum is below 1, when `time_factor` is negative, or when
    `max_prompt_tokens` would leave less than a token per block.
    """
    if max_prompt_tokens < 1 or max_output_tokens < 1 or time_factor < 0:
        raise ValueError("token maxima are at least 1, and time does not run backwards")
    prompts = _shrink((a.prompt_tokens for a in arrivals), max_prompt_tokens)
    outputs = _shrink((a.output_tokens for a in arrivals), max_output_tokens)
    scaled = []
    for a in arrivals:
        block, prompt = _scaled_prompt(a, prompts)
        output = max(1, floor(a.output_tokens * outputs))
        scaled.append(
            replace(
                a,
                at=a.at * time_factor,
                prompt_tokens=prompt,
                output_tokens=output,
                block_tokens=block,
            )
        )
    return scaled


def _shrink(lengths: Iterable[int], maximum: int) -> Fraction:
    """min(1, maximum / longest), exact so that the longest lands on the maximum."""
    longest = max(lengths, default=1)
    return Fraction(min(maximum, longest), longest)


def _scaled_prompt(arrival: Arrival, factor: Fraction) -> tuple[int, int]:
    """Tokens per block and prompt tokens of a shrunk arrival."""
    if arrival.prefix_blocks is None:
        return 0, max(1, floor(arrival.prompt_tokens * factor))
    # The block shrinks first, and the prompt with it: shared prefixes stay whole blocks.
    block = floor(arrival.block_tokens * factor)
    if not block:
        raise ValueError(
            f"the prompts cannot shrink by {ceil(1 / factor)}: "
            f"no token would be left in a block of {arrival.block_tokens}"
        )
    return block, max(1, arrival.prompt_tokens * block // arrival.block_tokens)


def pace(arrivals: Sequence[Arrival], rate: float) -> float:
    """The `time_factor` by which `arrivals` come at `rate` per second on average.

    Raises ValueError when they all come at once, which no factor can stretch.
    """
    span = arrivals[-1].at if arrivals else 0.0
    if not span or not rate > 0:
        raise ValueError("arrivals at one moment have no rate, and a rate is above 0")
    return (len(arrivals) - 1) / span / rate


def to_session(arrival: Arrival, start: float | None, model: str | None = None) -> Session:
    """The arrival as a session of one turn, whose prompt is its blocks and a part of its own.

    Equal blocks are equal segments; the last one may be cut, as the prompt ends within it.
    """
    segments: list[Segment] = []
    left = arrival.prompt_tokens
    for block in arrival.prefix_blocks or ():
        if left <= 0:
            break
        segments.append(Segment(f"block/{block}", min(left, arrival.block_tokens)))
        left -= arrival.block_tokens
    if left > 0:
        segments.append(Segment(f"prompt/{arrival.index}", left))
    turn = Turn(tuple(segments), arrival.output_tokens, model=model)
    return Session(arrival.index, (turn,), start=start)
