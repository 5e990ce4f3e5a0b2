"""Presets: what their sessions are like, and what overrides change."""

from collections import Counter
from statistics import fmean

import pytest

from tandem_loadtest.workload.presets import PRESETS, SessionBuilder, preset
from tandem_loadtest.workload.sessions import Segment, Session
from tandem_loadtest.workload.settings import Workload, WorkloadError

MANY = 4000


def made(workload: Workload, count: int = MANY, seed: int = 3) -> list[Session]:
    builder = SessionBuilder(workload, seed)
    return [builder.session(index, None) for index in range(count)]


def segments(content: tuple[Segment, ...] | str) -> tuple[Segment, ...]:
    assert not isinstance(content, str)
    return content


def first_prompt(session: Session) -> tuple[Segment, ...]:
    return segments(session.system) + segments(session.turns[0].prompt)


def tokens(parts: tuple[Segment, ...]) -> int:
    return sum(part.tokens for part in parts)


@pytest.mark.parametrize("name", PRESETS)
def test_sessions_have_the_means_of_their_preset(name: str) -> None:
    sessions, shape = made(Workload(preset=name)), PRESETS[name]
    assert fmean(tokens(first_prompt(s)) for s in sessions) == pytest.approx(
        shape.prompt.mean, rel=0.06
    )
    outputs = [turn.output_tokens for s in sessions for turn in s.turns]
    assert fmean(outputs) == pytest.approx(shape.output.mean, rel=0.06)
    assert {len(s.turns) for s in sessions} == {shape.turns}


@pytest.mark.parametrize("name", PRESETS)
def test_all_parts_have_a_token_and_the_user_says_something(name: str) -> None:
    for workload in (
        Workload(preset=name),
        Workload(preset=name, prompt_tokens=1, output_tokens=1, turns=2),
        Workload(preset=name, shared=1.0),
    ):
        for session in made(workload, 200):
            for turn in session.turns:
                assert turn.output_tokens >= 1
                assert segments(turn.prompt)
            parts = [part for turn in session.turns for part in segments(turn.prompt)]
            assert all(part.tokens >= 1 for part in (*segments(session.system), *parts))


@pytest.mark.parametrize("name", PRESETS)
def test_a_session_follows_from_seed_and_index_alone(name: str) -> None:
    workload = Workload(preset=name, turns=3, models={"a": 1, "b": 1})
    sessions = made(workload, 50)
    assert made(workload, 50) == sessions
    assert SessionBuilder(workload, 3).session(37, None) == sessions[37]
    others = made(workload, 50, seed=4)
    assert name == "fixed" or [s.turns for s in others] != [s.turns for s in sessions]


@pytest.mark.parametrize("name", PRESETS)
def test_overrides_set_the_means(name: str) -> None:
    sessions = made(Workload(preset=name, prompt_tokens=900, output_tokens=33))
    assert fmean(tokens(first_prompt(s)) for s in sessions) == pytest.approx(900, rel=0.06)
    assert fmean(s.turns[0].output_tokens for s in sessions) == pytest.approx(33, rel=0.06)


def test_fixed_lengths_are_equal_and_share_nothing() -> None:
    sessions = made(Workload(preset="fixed", prompt_tokens=77, output_tokens=9), 100)
    assert {(tokens(first_prompt(s)), s.turns[0].output_tokens) for s in sessions} == {(77, 9)}
    assert len({part.key for s in sessions for part in first_prompt(s)}) == 100


@pytest.mark.parametrize(("share", "expected"), [(None, 0.1), (0.4, 0.4), (0.0, 0.0), (1.0, 1.0)])
def test_bimodal_prompts_are_short_or_long(share: float | None, expected: float) -> None:
    lengths = [
        tokens(first_prompt(s)) for s in made(Workload(preset="bimodal", long=share, shared=0.0))
    ]
    long = [length for length in lengths if 2000 <= length <= 4000]
    assert all(50 <= length <= 200 for length in lengths if length < 2000)
    assert len(long) / MANY == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("name", ["shared-prefix", "chat", "fixed"])
def test_the_system_prompt_is_a_share_of_every_prompt(name: str) -> None:
    for session in made(Workload(preset=name, shared=0.6), 200):
        assert {part.key for part in segments(session.system)} <= {"system"}
        total = tokens(first_prompt(session))
        assert tokens(segments(session.system)) == min(total - 1, round(0.6 * total))


def test_the_system_prompt_of_shared_prefix_is_one_text_in_all_sessions() -> None:
    sessions = made(Workload(preset="shared-prefix"), 200)
    assert {s.system for s in sessions} == {(Segment("system", 819),)}


def test_documents_are_shared_and_popular_by_zipfs_law() -> None:
    sessions = made(Workload(preset="rag"), 40_000)
    documents = Counter(segments(s.turns[0].prompt)[0] for s in sessions)
    # Equal keys have equal lengths: a document is the same text in every prompt.
    assert len({document.key for document in documents}) == len(documents) == 100
    harmonic = sum(1 / k for k in range(1, 101))
    for rank in (1, 2, 10):
        count = next(n for d, n in documents.items() if d.key == f"document/{rank - 1}")
        assert count / 40_000 == pytest.approx(1 / rank / harmonic, rel=0.12)
    questions = [segments(s.turns[0].prompt)[1].key for s in sessions]
    assert len(set(questions)) == len(questions)


def test_a_system_prompt_before_documents_leaves_them_equal() -> None:
    sessions = made(Workload(preset="rag", shared=0.25), 2000)
    prefixes = {(s.system, segments(s.turns[0].prompt)[0]) for s in sessions}
    assert len(prefixes) == len({document.key for _, document in prefixes})
    for system, document in prefixes:
        total = tokens(segments(system)) + document.tokens
        assert tokens(segments(system)) == round(0.25 * total)


def test_conversations_have_turns_with_text_of_their_own_and_think_time() -> None:
    sessions = made(Workload(preset="multi-turn", turns=4, think=1.5))
    keys = [part.key for s in sessions for turn in s.turns for part in segments(turn.prompt)]
    assert len(set(keys)) == len(keys) == 4 * MANY
    assert all(turn.think > 0 for s in sessions for turn in s.turns)
    thinks = [turn.think for s in sessions for turn in s.turns[1:]]
    assert fmean(thinks) == pytest.approx(1.5, rel=0.05)
    assert max(thinks) <= 15


def test_without_think_time_turns_follow_at_once() -> None:
    sessions = made(Workload(preset="multi-turn", think=0.0), 20)
    assert {turn.think for s in sessions for turn in s.turns} == {0.0}


def test_models_are_mixed_by_weight_and_kept_within_a_session() -> None:
    workload = Workload(preset="multi-turn", models={"a": 3, "b": 1})
    sessions = made(workload)
    assert {len({turn.model for turn in s.turns}) for s in sessions} == {1}
    models = Counter(s.turns[0].model for s in sessions)
    assert set(models) == {"a", "b"}
    assert models["a"] / MANY == pytest.approx(0.75, abs=0.03)


def test_a_mix_of_models_changes_nothing_else() -> None:
    plain = made(Workload(preset="chat"), 50)
    mixed = made(Workload(preset="chat", models={"a": 1}), 50)
    assert [first_prompt(s) for s in mixed] == [first_prompt(s) for s in plain]
    assert {s.turns[0].model for s in plain} == {None}


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (Workload(preset="char"), "'char': write one of fixed, chat, .*, trace, sharegpt"),
        (Workload(preset="chat", long=0.5), "only bimodal .* not chat"),
    ],
)
def test_an_unknown_preset_or_an_override_that_does_not_fit_is_an_error(
    workload: Workload, message: str
) -> None:
    with pytest.raises(WorkloadError, match=message):
        preset(workload)


@pytest.mark.parametrize("weight", [0, -1, float("nan")])
def test_a_weight_of_a_model_is_above_zero(weight: float) -> None:
    with pytest.raises(WorkloadError, match="model 'a': its weight must be above 0"):
        SessionBuilder(Workload(preset="chat", models={"a": weight}), 1)


def test_every_preset_has_a_line_of_help() -> None:
    for shape in PRESETS.values():
        assert shape.help.endswith(".")
        assert len(shape.help) < 100
