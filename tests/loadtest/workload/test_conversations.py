"""The made-up workload: deterministic, shared prefixes, answers carried, prompts repeated."""

from itertools import pairwise

import pytest

from tandem_contract.request_kinds import RequestKind
from tandem_loadtest.calls import Call, Message
from tandem_loadtest.workload.conversations import Script, Shape, Step, workload

SHAPE = Shape()
ANSWERS = ["first answer", "second answer", "third answer"]


def text(call: Call) -> str:
    """The prompt as one string, roles included."""
    if isinstance(call.prompt, str):
        return call.prompt
    return "\n".join(f"{m.role}: {m.content}" for m in call.prompt if isinstance(m, Message))


def longs() -> list[Script]:
    return [s for s in workload(SHAPE, seed=1) if s.document]


def shorts() -> list[Script]:
    return [s for s in workload(SHAPE, seed=1) if not s.document]


def test_the_workload_follows_from_the_seed() -> None:
    assert workload(SHAPE, seed=1) == workload(SHAPE, seed=1)
    assert workload(SHAPE, seed=1) != workload(SHAPE, seed=2)


def test_the_workload_has_the_requested_shape() -> None:
    assert len(longs()) == SHAPE.groups * SHAPE.users
    assert len(shorts()) == SHAPE.shorts
    for script in longs():
        assert len(script.document) == SHAPE.document
        assert [len(q) for q in script.questions] == [SHAPE.question] * SHAPE.turns
    assert {len(s.questions[0]) for s in shorts()} == {SHAPE.short}
    assert len({s.name for s in workload(SHAPE)}) == len(workload(SHAPE))


@pytest.mark.parametrize("length", [1, 2, 3, 17, 500])
def test_texts_have_exactly_their_length(length: int) -> None:
    for script in workload(Shape(document=length, question=length, short=length)):
        assert {len(t) for t in (script.document, *script.questions) if t} == {length}


def test_text_is_plain_ascii() -> None:
    assert all(text(s.call(0, [])).isascii() for s in workload(SHAPE))


def test_users_of_a_group_share_its_document_as_a_prefix_of_the_prompt() -> None:
    for group in range(SHAPE.groups):
        prompts = [text(s.call(0, [])) for s in longs() if s.name.startswith(f"group-{group}-")]
        assert len(prompts) == SHAPE.users
        for prompt, next_prompt in pairwise(prompts):
            assert prompt != next_prompt
            assert prompt[: SHAPE.document] == next_prompt[: SHAPE.document]


def test_groups_and_short_prompts_share_no_long_prefix() -> None:
    documents = {s.document for s in longs()}
    assert len(documents) == SHAPE.groups
    assert len({s.questions for s in shorts()}) == SHAPE.shorts


def test_each_turn_continues_the_one_before() -> None:
    for script in longs():
        for step in range(1, SHAPE.turns):
            before, now = (text(script.call(i, ANSWERS)) for i in (step - 1, step))
            assert now.startswith(before)
            assert ANSWERS[step - 1] in now


def test_the_last_question_is_asked_again_the_other_way() -> None:
    for script in longs():
        *_, last, repeated_call = (script.call(i, ANSWERS) for i in range(len(script.steps)))
        assert repeated_call.prompt == last.prompt
        assert repeated_call.stream is not last.stream


def test_answers_have_exactly_their_length() -> None:
    calls = [s.call(0, []) for s in workload(SHAPE)]
    assert {(c.max_tokens, c.ignore_eos) for c in calls} == {(SHAPE.max_tokens, True)}


def test_a_repeated_question_keeps_its_first_answer() -> None:
    steps = (Step(0, True), Step(0, True), Step(1, True))
    script = Script("s", "", ("q0", "q1"), steps, chat=False, max_tokens=1)
    assert script.call(2, ["one", "two"]).prompt == (
        "Question: q0\nAnswer:one\nQuestion: q1\nAnswer:"
    )


def test_a_step_needs_the_answers_before_it() -> None:
    with pytest.raises(ValueError, match="step 2 continues 2 answers, 1 are here"):
        longs()[0].call(2, ["one"])


@pytest.mark.parametrize("scripts", [longs(), shorts()])
def test_chat_and_completions_streaming_and_not_all_occur(scripts: list[Script]) -> None:
    calls = [s.call(i, ANSWERS) for s in scripts for i in range(len(s.steps))]
    assert {(c.endpoint is RequestKind.CHAT, c.stream) for c in calls} == {
        (True, True), (True, False), (False, True), (False, False),
    }  # fmt: skip


def test_a_chat_alternates_roles() -> None:
    script = next(s for s in longs() if s.chat)
    prompt = script.call(2, ANSWERS).prompt
    assert [m.role for m in prompt if isinstance(m, Message)] == [
        "system", "user", "assistant", "user", "assistant", "user",
    ]  # fmt: skip
