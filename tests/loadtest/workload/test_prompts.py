"""Prompts: exact tokens, shared prefixes, every kind of request, and calibration."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from tandem_contract.request_kinds import RequestKind
from tandem_loadtest.calls import Answer, Call, Message
from tandem_loadtest.workload.prompts import PromptWriter
from tandem_loadtest.workload.schedule import sessions
from tandem_loadtest.workload.sessions import Segment, Session, Turn
from tandem_loadtest.workload.settings import Arrivals, Prompts, Workload, WorkloadError
from tandem_loadtest.workload.text import VOCABULARY

from .tokenizers import KINDS, byte_level, with_start_token, write

TEXT_KINDS = (
    RequestKind.CHAT, RequestKind.COMPLETIONS, RequestKind.RESPONSES, RequestKind.MESSAGES,
)  # fmt: skip
MESSAGE_KINDS = (RequestKind.CHAT, RequestKind.RESPONSES, RequestKind.MESSAGES)
WORDS = Prompts(style="words", tokens_per_word=1.0)
IDS = Prompts(style="token-ids")
SESSION = Session(
    4,
    (
        Turn((Segment("document/1", 50), Segment("user/4/0", 20)), 5),
        Turn((Segment("user/4/1", 12),), 6, model="lora"),
        Turn((Segment("user/4/2", 9),), 7),
    ),
    system=(Segment("system", 30),),
)
ANSWERS = (Answer("first answer", (70, 71)), Answer("second answer", (72,)))


def writer(prompts: Prompts, kind: RequestKind = RequestKind.CHAT, seed: int = 1) -> PromptWriter:
    return PromptWriter(prompts, kind=kind, seed=seed)


def messages(call: Call) -> list[Message]:
    assert isinstance(call.prompt, tuple)
    return [message for message in call.prompt if isinstance(message, Message)]


def text(call: Call) -> str:
    assert isinstance(call.prompt, str)
    return call.prompt


def ids(call: Call) -> tuple[int, ...]:
    assert isinstance(call.prompt, tuple)
    return tuple(token for token in call.prompt if isinstance(token, int))


def common_length(left: Sequence[object], right: Sequence[object]) -> int:
    """How many elements both begin with."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


# Every style


def test_a_call_has_what_its_turn_says() -> None:
    plain = PromptWriter(WORDS, kind=RequestKind.MESSAGES, stream=False, ignore_eos=False)
    call = plain.call(SESSION, 1, ANSWERS[:1])
    assert (call.kind, call.max_tokens, call.model) == (RequestKind.MESSAGES, 6, "lora")
    assert (call.stream, call.ignore_eos) == (False, False)
    default = writer(WORDS).call(SESSION, 0, ())
    assert (default.stream, default.ignore_eos, default.model) == (True, True, None)


@pytest.mark.parametrize("prompts", [WORDS, IDS])
def test_prompts_follow_from_the_seed(prompts: Prompts) -> None:
    kind = RequestKind.COMPLETIONS
    calls = [writer(prompts, kind, seed).call(SESSION, 2, ANSWERS) for seed in (1, 1, 2)]
    assert calls[0] == calls[1] != calls[2]


@pytest.mark.parametrize(("prompts", "kind"), [(WORDS, k) for k in TEXT_KINDS] + [
    (IDS, RequestKind.COMPLETIONS), (IDS, RequestKind.GENERATE),
])  # fmt: skip
def test_each_turn_continues_the_one_before(prompts: Prompts, kind: RequestKind) -> None:
    calls = [writer(prompts, kind).call(SESSION, turn, ANSWERS[:turn]) for turn in range(3)]
    for before, after in pairwise(calls):
        assert after.prompt[: len(before.prompt)] == before.prompt
        assert len(after.prompt) > len(before.prompt)


def test_a_turn_needs_the_answers_before_it() -> None:
    with pytest.raises(ValueError, match="turn 2 continues 2 answers, 1 are here"):
        writer(WORDS).call(SESSION, 2, ANSWERS[:1])


@pytest.mark.parametrize(
    ("prompts", "kind", "message"),
    [
        (IDS, RequestKind.CHAT, "chat takes text: use the prompt style `tokenizer` or `words`"),
        (IDS, RequestKind.MESSAGES, "messages takes text"),
        (WORDS, RequestKind.GENERATE, "generate takes token ids: use the prompt style `token-ids`"),
        (Prompts(style="letters"), RequestKind.CHAT, "'letters': write one of token-ids, tok"),
        (Prompts(style="tokenizer"), RequestKind.CHAT, "needs the path of a tokenizer.json"),
        (Prompts(style="tokenizer", tokenizer="none"), RequestKind.CHAT, "none: cannot read"),
    ],
)
def test_a_style_that_cannot_be_sent_is_an_error(
    prompts: Prompts, kind: RequestKind, message: str
) -> None:
    with pytest.raises(WorkloadError, match=message):
        writer(prompts, kind)


# Messages


@pytest.mark.parametrize("kind", MESSAGE_KINDS)
def test_a_conversation_alternates_roles_and_repeats_answers(kind: RequestKind) -> None:
    parts = messages(writer(WORDS, kind).call(SESSION, 2, ANSWERS))
    assert [part.role for part in parts] == [
        "system", "user", "assistant", "user", "assistant", "user",
    ]  # fmt: skip
    assert [part.content for part in parts][2::2] == ["first answer", "second answer"]
    assert [len(part.content.split()) for part in parts] == [30, 70, 2, 12, 2, 9]


def test_an_answer_without_text_is_replaced_by_text_of_its_length() -> None:
    # The messages API refuses empty messages.
    parts = messages(writer(WORDS).call(SESSION, 2, (Answer(), ANSWERS[1])))
    assert len(parts[2].content.split()) == SESSION.turns[0].output_tokens


def test_without_a_system_prompt_there_is_no_system_message() -> None:
    session = Session(0, (Turn((Segment("user/0/0", 9),), 1),))
    assert [part.role for part in messages(writer(WORDS).call(session, 0, ()))] == ["user"]


# Text of a file


FILE = Session(0, (Turn("How are you?", 3), Turn("  And now?\n", 4)), system="Be brief.")


def test_text_of_a_file_is_sent_as_it_is() -> None:
    parts = messages(writer(WORDS).call(FILE, 1, (Answer("Fine."),)))
    assert [part.content for part in parts] == [
        "Be brief.", "How are you?", "Fine.", "  And now?\n",
    ]  # fmt: skip
    completion = writer(WORDS, RequestKind.COMPLETIONS)
    assert completion.call(FILE, 1, (Answer(" Fine."),)).prompt == (
        "Be brief.\nHow are you? Fine.\n  And now?\n"
    )
    bare = Session(0, (Turn("How are you?", 3),), system="")
    assert completion.call(bare, 0, ()).prompt == "How are you?"
    assert [part.role for part in messages(writer(WORDS).call(bare, 0, ()))] == ["user"]


def test_text_of_a_file_has_no_token_ids() -> None:
    with pytest.raises(ValueError, match="cannot be sent as token ids: use another prompt style"):
        writer(IDS, RequestKind.COMPLETIONS).call(FILE, 0, ())


# Token ids


def test_ids_have_exactly_their_number_and_repeat_the_answers() -> None:
    calls = [writer(IDS, RequestKind.GENERATE).call(SESSION, i, ANSWERS) for i in range(3)]
    assert [len(ids(call)) for call in calls] == [100, 100 + 2 + 12, 100 + 2 + 12 + 1 + 9]
    assert ids(calls[1])[100:102] == (70, 71)
    assert set(ids(calls[0])) <= set(VOCABULARY)


def test_an_answer_without_ids_is_replaced_by_ids_of_its_length() -> None:
    call = writer(IDS, RequestKind.COMPLETIONS).call(SESSION, 1, (Answer("text"),))
    assert len(ids(call)) == 100 + 5 + 12


def test_ids_are_shared_where_segments_are_and_nowhere_else() -> None:
    workload, closed = Workload(preset="rag", shared=0.1), Arrivals(process="closed")
    made = list(sessions(workload, closed, seed=1, limit=60))
    source = writer(IDS, RequestKind.COMPLETIONS)
    actual = [ids(source.call(session, 0, ())) for session in made]
    expected = [
        [
            (part.key, i)
            for part in (*session.system, *session.turns[0].prompt)
            if isinstance(part, Segment)
            for i in range(part.tokens)
        ]
        for session in made
    ]
    for i in range(60):
        for j in range(i):
            common = common_length(expected[i], expected[j])
            # By chance, the first tokens after that may be equal, too.
            assert common <= common_length(actual[i], actual[j]) < common + 8


# Words


@pytest.mark.parametrize("per_word", [0.8, 1.0, 1.3, 2.6])
def test_words_are_the_tokens_over_the_tokens_per_word(per_word: float) -> None:
    prompts = Prompts(style="words", tokens_per_word=per_word)
    for tokens in (1, 2, 17, 512, 30_000):
        session = Session(0, (Turn((Segment("user", tokens),), 1),))
        (part,) = messages(writer(prompts).call(session, 0, ()))
        assert len(part.content.split()) == max(1, round(tokens / per_word))


def test_many_short_segments_do_not_add_up_rounding_errors() -> None:
    blocks = tuple(Segment(f"block/{i}", 3) for i in range(400))
    prompts = Prompts(style="words", tokens_per_word=1.3)
    (part,) = messages(writer(prompts).call(Session(0, (Turn(blocks, 1),)), 0, ()))
    assert len(part.content.split()) == round(1200 / 1.3)
    (start,) = messages(writer(prompts).call(Session(0, (Turn(blocks[:100], 1),)), 0, ()))
    assert part.content.startswith(start.content)


def test_prompts_become_shorter_by_what_the_server_adds_per_message() -> None:
    prompts = Prompts(style="words", tokens_per_word=1.0, tokens_per_message=3.5)
    parts = messages(writer(prompts).call(SESSION, 2, ANSWERS))
    # System and user: 2 × 3.5; later turns pay for the answer before them, too.
    assert [len(part.content.split()) for part in parts] == [30, 63, 2, 5, 2, 2]
    completion = writer(prompts, RequestKind.COMPLETIONS).call(SESSION, 0, ())
    assert len(text(completion).split()) == 100 - round(3.5)


def test_a_message_never_becomes_empty() -> None:
    prompts = Prompts(style="words", tokens_per_message=50)
    parts = messages(writer(prompts).call(SESSION, 2, ANSWERS))
    assert min(len(part.content.split()) for part in parts) == 1


def test_estimated_tokens_follow_the_calibration() -> None:
    prompts = Prompts(style="words", tokens_per_word=2.0)
    assert [writer(prompts).count(t) for t in ("", "one", "one two\nthree")] == [1, 2, 6]


def test_sizes_of_words_are_words_and_messages() -> None:
    source = writer(WORDS)
    assert source.size(source.call(SESSION, 2, ANSWERS)) == (30 + 70 + 2 + 12 + 2 + 9, 6)
    completion = writer(WORDS, RequestKind.COMPLETIONS)
    assert completion.size(completion.call(SESSION, 0, ())) == (100, 1)
    source = writer(IDS, RequestKind.COMPLETIONS)
    assert source.size(source.call(SESSION, 0, ())) == (100, 0)


# A tokenizer


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_contents_have_exactly_their_tokens_with_a_tokenizer(kind: str, tmp_path: Path) -> None:
    tokenizer = KINDS[kind]()
    prompts = Prompts(style="tokenizer", tokenizer=str(write(tmp_path, tokenizer)))

    def count(content: str) -> int:
        return len(tokenizer.encode(content, add_special_tokens=False).ids)

    chat, completions = (writer(prompts, k) for k in (RequestKind.CHAT, RequestKind.COMPLETIONS))
    contents = [part.content for part in messages(chat.call(SESSION, 2, (Answer(), Answer())))]
    assert [count(content) for content in contents] == [30, 70, 5, 12, 6, 9]
    call = completions.call(SESSION, 2, (Answer(), Answer()))
    # The server's tokenizer adds its special tokens to a completion's prompt.
    assert len(tokenizer.encode(text(call)).ids) == 100 + 5 + 12 + 6 + 9
    for preset in ("chat", "rag", "shared-prefix", "bimodal"):
        workload = Workload(preset=preset)
        for session in sessions(workload, Arrivals(process="closed"), seed=3, limit=15):
            parts = (*session.system, *session.turns[0].prompt)
            total = sum(part.tokens for part in parts if isinstance(part, Segment))
            prompt = text(completions.call(session, 0, ()))
            assert len(tokenizer.encode(prompt).ids) == total


def test_a_shared_document_is_one_text_with_a_tokenizer(tmp_path: Path) -> None:
    prompts = Prompts(
        style="tokenizer", tokenizer=str(write(tmp_path, byte_level(400))), tokens_per_message=4.0
    )
    left, right = (
        Session(i, (Turn((Segment("document/1", 300), Segment(f"user/{i}/0", 40)), 5),))
        for i in range(2)
    )
    source = writer(prompts)
    contents = [messages(source.call(session, 0, ()))[0].content for session in (left, right)]
    alone = Session(2, (Turn((Segment("document/1", 304),), 5),))
    document = messages(source.call(alone, 0, ()))[0].content
    assert all(content.startswith(document + " ") for content in contents)
    left_words, right_words = (content.split() for content in contents)
    assert common_length(left_words, right_words) == len(document.split())


def test_sizes_with_a_tokenizer_are_tokens(tmp_path: Path) -> None:
    tokenizer = with_start_token(byte_level(400))
    prompts = Prompts(style="tokenizer", tokenizer=str(write(tmp_path, tokenizer)))
    chat, completions = (writer(prompts, k) for k in (RequestKind.CHAT, RequestKind.COMPLETIONS))
    assert chat.size(chat.call(SESSION, 0, ())) == (100, 2)
    # With the start token that the server adds.
    assert completions.size(completions.call(SESSION, 0, ())) == (100, 1)
    assert chat.count("time year") == len(tokenizer.encode("time year").ids) - 1
