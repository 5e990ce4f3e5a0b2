"""Traces: both formats, clear errors, and scaling that keeps what prompts share."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_loadtest.workload.sessions import Segment, Session, Turn
from tandem_loadtest.workload.traces import (
    Arrival,
    TraceError,
    load_trace,
    pace,
    scale,
    to_session,
)

MOONCAKE = [
    {"timestamp": 2000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 2]},
    {"timestamp": 2500, "input_length": 600, "output_length": 0, "hash_ids": [0, 3], "more": 1},
    {"timestamp": 2750, "input_length": 90, "output_length": 3, "hash_ids": [9]},
]
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.5000000,374,44\r\n"
    "2023-11-16 18:15:50.7500000,396,109"
)


def written(folder: Path, content: str | bytes) -> Path:
    file = folder / "trace"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def mooncake(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_mooncake_lines_are_read(tmp_path: Path) -> None:
    assert load_trace(written(tmp_path, mooncake(*MOONCAKE))) == [
        Arrival(0, 0.0, 1100, 7, (0, 1, 2), 512),
        Arrival(1, 0.5, 600, 1, (0, 3), 512),
        Arrival(2, 0.75, 90, 3, (9,), 512),
    ]


def test_azure_rows_are_read(tmp_path: Path) -> None:
    assert load_trace(written(tmp_path, AZURE)) == [
        Arrival(0, 0.0, 374, 44),
        Arrival(1, 4.25, 396, 109),
    ]


@pytest.mark.parametrize("before", ["\n\n", "\ufeff"])
@pytest.mark.parametrize("content", [mooncake(*MOONCAKE), AZURE])
def test_blank_lines_and_a_byte_order_mark_do_no_harm(
    tmp_path: Path, before: str, content: str
) -> None:
    plain = load_trace(written(tmp_path, content))
    assert load_trace(written(tmp_path, before + content + "\n\n")) == plain


def test_columns_may_stand_in_any_order_among_others(tmp_path: Path) -> None:
    content = "GeneratedTokens,Region,ContextTokens,TIMESTAMP\n4,eu,30,2024-05-10T00:00:00Z\n"
    assert load_trace(written(tmp_path, content)) == [Arrival(0, 0.0, 30, 4)]


def test_the_limit_leaves_later_lines_unread(tmp_path: Path) -> None:
    file = written(tmp_path, mooncake(MOONCAKE[0]) + "no JSON\n")
    assert len(load_trace(file, limit=1)) == 1


def test_arrivals_are_put_in_order_of_time(tmp_path: Path) -> None:
    arrivals = load_trace(written(tmp_path, mooncake(*reversed(MOONCAKE))))
    assert [(a.index, a.prompt_tokens) for a in arrivals] == [(0, 1100), (1, 600), (2, 90)]


GOOD = mooncake(MOONCAKE[0])


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        (GOOD + "{", 2, "not JSON"),
        (GOOD + mooncake({**MOONCAKE[0], "input_length": "7"}), 2, "input_length: Expected `int`"),
        (GOOD + mooncake({**MOONCAKE[0], "input_length": 1.5}), 2, "input_length: Expected `int`"),
        (GOOD + mooncake({**MOONCAKE[0], "output_length": -1}), 2, "output_length: .*>= 0"),
        (GOOD + mooncake({**MOONCAKE[0], "timestamp": -1}), 2, "timestamp: .*>= 0"),
        (GOOD + mooncake({**MOONCAKE[0], "timestamp": None}), 2, "timestamp: Expected"),
        (GOOD + mooncake({**MOONCAKE[0], "hash_ids": [1, "2"]}), 2, r"hash_ids\[1\]: Expected"),
        (GOOD + mooncake({**MOONCAKE[0], "hash_ids": [-1]}), 2, r"hash_ids\[0\]: .*>= 0"),
        (GOOD + "\n" + mooncake({"timestamp": 1}), 3, "missing required field `input_length`"),
        (GOOD + mooncake([1]), 2, "Expected `object`"),
        (b"{}\n\xff\n", 2, "not UTF-8"),
        ("hello, world\n", 1, "not a known trace: expected Mooncake .* TIMESTAMP, ContextTokens"),
        ("\n[1, 2]\n", 2, "not a known trace"),
        ("TIMESTAMP,ContextTokens\n", 1, "missing column GeneratedTokens"),
        (AZURE + "\n2023-11-16 18:15:50,396", 4, "GeneratedTokens: None is not a whole number"),
        (AZURE + "\n2023-11-16 18:15:50,many,3", 4, "ContextTokens: 'many' is not a whole"),
        (AZURE + "\n2023-11-16 18:15:50,-5,3", 4, "ContextTokens: -5 is negative"),
        (AZURE + "\nyesterday,5,3", 4, "TIMESTAMP: 'yesterday' is no time"),
        (AZURE + '\n"2023', 4, "not CSV"),
    ],
)  # fmt: skip
def test_an_error_names_file_line_and_field(
    tmp_path: Path, content: str | bytes, line: int, message: str
) -> None:
    file = written(tmp_path, content)
    with pytest.raises(TraceError, match=f"^{file}:{line}: .*{message}") as caught:
        load_trace(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "\n \n", AZURE.partition("\n")[0]])
def test_a_file_without_requests_is_an_error(tmp_path: Path, content: str) -> None:
    with pytest.raises(TraceError, match="request"):
        load_trace(written(tmp_path, content))


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read it: No such file"):
        load_trace(tmp_path / "none")


def shared(left: Sequence[object], right: Sequence[object]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


"""A vocabulary in which tokens are equal on purpose only."""


@st.composite
def traces(draw: st.DrawFn) -> list[Arrival]:
    """Prompts over blocks of a tree: equal ids stand at equal places, as in a recorded trace."""
    block = draw(st.sampled_from([4, 16, 512]))
    arrivals = []
    for index in range(draw(st.integers(1, 6))):
        branch = draw(st.integers(0, 4))
        depth = draw(st.integers(1, 6))
        ids = tuple(d if d < branch else 100 * index + 10 + d for d in range(depth))
        last = draw(st.integers(1, block))
        arrivals.append(
            Arrival(index, float(index), (depth - 1) * block + last, 1 + depth, ids, block)
        )
    return arrivals


@given(traces(), st.integers(512, 4096), st.integers(1, 9), st.floats(0, 10))
def test_scaled_prompts_share_exactly_their_scaled_blocks(
    arrivals: list[Arrival], longest: int, outputs: int, factor: float
) -> None:
    scaled = scale(
        arrivals, max_prompt_tokens=longest, max_output_tokens=outputs, time_factor=factor
    )
    for before, after in zip(arrivals, scaled, strict=True):
        assert 1 <= after.prompt_tokens <= min(longest, before.prompt_tokens)
        assert 1 <= after.output_tokens <= min(outputs, before.output_tokens)
        assert after.at == before.at * factor
        assert after.prefix_blocks == before.prefix_blocks
        assert after.block_tokens == scaled[0].block_tokens


@given(traces(), st.integers(512, 4096))
def test_scaling_keeps_proportions_to_a_token(arrivals: list[Arrival], longest: int) -> None:
    scaled = scale(arrivals, max_prompt_tokens=longest, max_output_tokens=9)
    for before, after in zip(arrivals, scaled, strict=True):
        exact = before.prompt_tokens * after.block_tokens / before.block_tokens
        assert abs(after.prompt_tokens - exact) <= 1


def test_prompts_without_blocks_scale_by_the_longest() -> None:
    arrivals = [Arrival(0, 0, 1000, 50), Arrival(1, 3, 250, 200), Arrival(2, 4, 1, 1)]
    scaled = scale(arrivals, max_prompt_tokens=100, max_output_tokens=20, time_factor=0.5)
    assert [(a.at, a.prompt_tokens, a.output_tokens) for a in scaled] == [
        (0, 100, 5), (1.5, 25, 20), (2, 1, 1),
    ]  # fmt: skip


def test_scaling_never_lengthens() -> None:
    arrivals = [Arrival(0, 0, 700, 3, (1, 2), 512)]
    assert scale(arrivals, max_prompt_tokens=9000, max_output_tokens=90) == arrivals
    assert scale([], max_prompt_tokens=1, max_output_tokens=1) == []


def test_blocks_that_would_vanish_are_an_error() -> None:
    with pytest.raises(ValueError, match="no token would be left in a block of 512"):
        scale([Arrival(0, 0, 5120, 1, (1,), 512)], max_prompt_tokens=9, max_output_tokens=1)


@pytest.mark.parametrize(("prompt", "output", "factor"), [(0, 1, 1), (1, 0, 1), (1, 1, -1)])
def test_limits_below_one_and_negative_time_are_errors(
    prompt: int, output: int, factor: float
) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        scale([], max_prompt_tokens=prompt, max_output_tokens=output, time_factor=factor)


def test_a_session_has_the_blocks_of_its_arrival_and_a_rest_of_its_own() -> None:
    arrival = Arrival(3, 1.5, 1100, 7, (0, 1), 512)
    segments = (Segment("block/0", 512), Segment("block/1", 512), Segment("prompt/3", 76))
    expected = Session(3, (Turn(segments, 7, model="lora"),), start=4.0)
    assert to_session(arrival, 4.0, "lora") == expected


def test_the_last_block_of_a_session_ends_with_the_prompt() -> None:
    (turn,) = to_session(Arrival(0, 0.0, 600, 1, (0, 3, 4), 512), None).turns
    assert turn.prompt == (Segment("block/0", 512), Segment("block/3", 88))


def test_a_session_without_blocks_shares_nothing() -> None:
    (turn,) = to_session(Arrival(9, 0.0, 600, 1), None).turns
    assert turn.prompt == (Segment("prompt/9", 600),)


@given(traces(), st.integers(512, 4096))
def test_sessions_share_what_their_scaled_arrivals_share(
    arrivals: list[Arrival], longest: int
) -> None:
    scaled = scale(arrivals, max_prompt_tokens=longest, max_output_tokens=9)
    prompts = [to_session(a, None).turns[0].prompt for a in scaled]
    tokens = [
        [(part.key, i) for part in prompt if isinstance(part, Segment) for i in range(part.tokens)]
        for prompt in prompts
    ]
    for i, a in enumerate(scaled):
        assert len(tokens[i]) == a.prompt_tokens
        for j, b in enumerate(scaled[:i]):
            blocks = shared(list(a.prefix_blocks or ()), list(b.prefix_blocks or ()))
            expected = min(blocks * a.block_tokens, a.prompt_tokens, b.prompt_tokens)
            assert shared(tokens[i], tokens[j]) == expected


def test_arrivals_are_paced_to_a_rate() -> None:
    arrivals = [Arrival(i, at, 1, 1) for i, at in enumerate((0.0, 1.0, 2.0, 9.0, 10.0))]
    factor = pace(arrivals, rate=8)
    scaled = scale(arrivals, max_prompt_tokens=1, max_output_tokens=1, time_factor=factor)
    assert [a.at for a in scaled] == pytest.approx([0, 0.05, 0.1, 0.45, 0.5])


@pytest.mark.parametrize(
    ("arrivals", "rate"),
    [
        ([], 1),
        ([Arrival(0, 0.0, 1, 1), Arrival(1, 0.0, 1, 1)], 1),
        ([Arrival(0, 0.0, 1, 1), Arrival(1, 2.0, 1, 1)], 0),
    ],
)
def test_arrivals_at_one_moment_have_no_rate(arrivals: list[Arrival], rate: float) -> None:
    with pytest.raises(ValueError, match="rate"):
        pace(arrivals, rate)
