"""How much text a prompt has, and which cannot fit a model."""

import json
import random
import string
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from tokenizers.pre_tokenizers import ByteLevel

from tandem_contract.prompt_length import (
    ANY_VOCABULARY,
    EXHAUSTING,
    TokenSizes,
    engine_length,
    length_problem,
    over_length,
    plain_text,
    prompt_text,
    token_sizes,
)
from tandem_contract.request_kinds import RequestKind

COMPLETIONS, CHAT = RequestKind.COMPLETIONS, RequestKind.CHAT
RESPONSES, MESSAGES = RequestKind.RESPONSES, RequestKind.MESSAGES
_members = msgspec.json.Decoder(dict[str, Raw])
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1000}}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        (COMPLETIONS, {"prompt": "four"}, (4, 4)),
        (COMPLETIONS, {"prompt": ["four", "seven77", "x"]}, (7, 7)),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, (0, 0)),
        (COMPLETIONS, {"prompt": [[1], [1, 2]]}, (0, 0)),
        (COMPLETIONS, {"prompt": "four", "truncate_prompt_tokens": 2}, (4, 0)),
        (COMPLETIONS, {"prompt": [1, 2, 3], "truncate_prompt_tokens": 2}, (0, 0)),
        (COMPLETIONS, {"prompt": []}, (0, 0)),
        (COMPLETIONS, {"prompt": [1, "a"]}, (0, 0)),
        (COMPLETIONS, {}, (0, 0)),
        (RequestKind.GENERATE, {"token_ids": [1, 2]}, (0, 0)),
        (CHAT, {"messages": [user("  four  ")]}, (8, 4)),
        (
            CHAT,
            {"messages": [user("four"), {"role": "assistant", "content": "six666"}]},
            (10, 4),
        ),
        (CHAT, {"messages": [user([{"type": "text", "text": "four"}, IMAGE])]}, (4, 4)),
        (CHAT, {"messages": [user("four"), {"role": "assistant", "tool_calls": []}]}, (4, 4)),
        (CHAT, {"messages": [user("four")], "chat_template": "x"}, (4, 0)),
        (CHAT, {"messages": 5}, (0, 0)),
        (RESPONSES, {"input": "four", "instructions": "six666"}, (10, 10)),
        (RESPONSES, {"input": [user([{"type": "input_text", "text": "four"}])]}, (4, 4)),
        (RESPONSES, {"input": "four", "truncation": "auto"}, (4, 0)),
        (MESSAGES, {"system": [{"type": "text", "text": "six666"}], "messages": []}, (6, 6)),
        (MESSAGES, {"system": "six666", "messages": [user("four")]}, (10, 10)),
    ],
)
def test_the_text_of_each_kind(
    kind: RequestKind, body: dict[str, Any], expected: tuple[int, int]
) -> None:
    members = _members.decode(json.dumps(body))
    assert prompt_text(kind, members)[:2] == expected


def test_a_text_of_more_than_the_longest_tokens_cannot_fit() -> None:
    sizes = TokenSizes(longest=10, varied=5)
    assert over_length(plain_text("x" * 640), 64, sizes) is None
    assert over_length(plain_text("x" * 641), None, sizes) is None
    problem = over_length(plain_text("x" * 641), 64, sizes)
    assert problem is not None
    assert problem.startswith("This model's maximum context length is 64 tokens. However, your")
    assert "641 characters, which are at least 65 tokens" in problem


ALPHABET = string.ascii_letters + string.digits
HAN = "".join(chr(ord("\N{CJK UNIFIED IDEOGRAPH-4E00}") + n) for n in range(100))


@pytest.mark.parametrize(
    ("text", "varied"),
    [
        (ALPHABET, 62 - 12),
        (ALPHABET * 3000, 186_000 - 12),
        # White space, control characters and all that is no ASCII are left out before.
        ("\n \x7f\N{COMBINING ACUTE ACCENT}\N{CJK UNIFIED IDEOGRAPH-4E2D}".join(ALPHABET), 62 - 12),
        ("short", 0),
        *((ALPHABET[:period] * 50_000, 0) for period in (1, 2, 3, 4, 6, 12)),
        (" " * 200_000, 0),
        ("\N{HANGUL CHOSEONG KIYEOK}\N{HANGUL JUNGSEONG A}" * 50_000, 0),
    ],
)
def test_varied_bytes_of_a_text(text: str, varied: int) -> None:
    assert plain_text(text).varied == varied


LONG_TOKENS = (
    *(".translatesAutoresizingMaskIntoConstraints", ".DataGridViewColumnHeadersHeightSizeMode"),
    *("rawdownloadcloneembedreportprint", string.ascii_lowercase, "BuyableInstoreAndOnline"),
    *("<|reserved_special_token_154|>", "<|place_holder_mm_span_0387|>", " electrophysiological"),
    *(" " * 128, "=" * 128, "-=" * 32, "*/\n" + "\n" * 60, "\N{EM DASH}" * 64, " \xa0" * 48),
    "\xc3\x83\xc3\x82" * 16,
)
"""The longest in the vocabularies of GPT-2, Llama 3, Qwen 3, DeepSeek, Mistral and gpt-oss."""


def test_the_longest_tokens_of_well_known_vocabularies_are_short_or_runs() -> None:
    sizes = token_sizes(LONG_TOKENS)
    assert sizes == TokenSizes(longest=128, varied=39, letters=sizes.letters)
    assert sizes.longest <= ANY_VOCABULARY.longest
    assert sizes.varied <= ANY_VOCABULARY.varied


UNITS = st.one_of(
    st.text(ALPHABET + " ", min_size=1, max_size=4), st.text(ALPHABET, min_size=6, max_size=6)
)
# The letters that are counted most strictly are all of these categories.
SHORT = st.text(min_size=1, max_size=ANY_VOCABULARY.letters)
OTHERS = st.text(st.characters(exclude_categories=["Lo", "Lu", "Ll"]), min_size=1, max_size=64)
RUNS = st.builds(lambda unit, size: (unit * size)[:size], UNITS, st.integers(1, 256))
TOKENS = st.one_of(st.sampled_from(LONG_TOKENS), SHORT, OTHERS, RUNS)


@given(st.lists(TOKENS, min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_no_text_has_fewer_tokens_than_are_counted(
    vocabulary: list[str], random: random.Random
) -> None:
    tokens = random.choices(vocabulary, k=random.randrange(1, 100))
    text = plain_text("".join(tokens))
    assert text.least_tokens() <= len(tokens)
    assert text.least_tokens(token_sizes(vocabulary)) <= len(tokens)


def test_ordinary_text_of_14_mb_cannot_fit_131072_tokens() -> None:
    draw = random.Random(1).choices
    sizes = (1, 2, 3, 4, 5, 6, 7, 9) * 50
    words = ["".join(draw(string.ascii_lowercase, k=size)) for size in sizes]
    text = " ".join(draw(words, k=24_000) * 100)
    body = json.dumps({"messages": [user(text)]})
    length = 131_072
    assert length_problem(CHAT, _members.decode(body), len(body), length) is not None
    assert length_problem(CHAT, _members.decode(body), len(body), 262_144) is None


@pytest.mark.parametrize(
    ("first", "last"),
    [
        pytest.param("\N{CJK UNIFIED IDEOGRAPH-4E00}", "\N{CJK UNIFIED IDEOGRAPH-9FA5}", id="zh"),
        pytest.param("\N{HIRAGANA LETTER SMALL A}", "\N{HIRAGANA LETTER N}", id="ja"),
        pytest.param("\N{KATAKANA LETTER SMALL A}", "\N{KATAKANA LETTER N}", id="katakana"),
        pytest.param("\N{HANGUL SYLLABLE GA}", "\N{HANGUL SYLLABLE HI}", id="ko"),
        pytest.param("\N{CYRILLIC SMALL LETTER A}", "\N{CYRILLIC SMALL LETTER YA}", id="ru"),
    ],
)
def test_text_of_14_mb_in_other_scripts_cannot_fit_131072_tokens(first: str, last: str) -> None:
    draw, signs = random.Random(1), "\N{IDEOGRAPHIC COMMA}\N{IDEOGRAPHIC FULL STOP}"
    letters = [chr(n) for n in range(ord(first), ord(last) + 1)]
    size = len(10 * first.encode() + signs[0].encode())
    sentences = [
        "".join(draw.choices(letters, k=10)) + draw.choice(signs)
        for _ in range(14_190_000 // 100 // size)
    ]
    text = "".join(sentences * 100)
    body = json.dumps({"messages": [user(text)]}, ensure_ascii=False).encode()
    assert 14_000_000 < len(body) < 14_300_000
    members = _members.decode(body)
    assert length_problem(CHAT, members, len(body), 131_072) is not None
    assert length_problem(CHAT, members, len(body), 262_144) is None


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        (HAN, 100 - 12),
        (HAN * 2000, 200_000 - 12),
        *((HAN[:period] * 50_000, 0) for period in (1, 2, 3, 4, 6, 12)),
        # Marks, signs and white space are no letters, and neither is one twelve after them.
        ("\N{IDEOGRAPHIC SPACE}" * 24 + HAN[:24], 12),
        ("\N{COMBINING KATAKANA-HIRAGANA VOICED SOUND MARK}" * 100, 0),
        ("\N{COMBINING CYRILLIC TITLO}\N{COMBINING CYRILLIC PSILI PNEUMATA}" * 13, 0),
        # Pairs of surrogates around the end of a piece count nothing twice.
        ("\N{CJK UNIFIED IDEOGRAPH-20000}" * 65_530 + HAN[:12], 0),
        ("x" * 100_000 + HAN, 100 - 12),
        (ALPHABET * 3000, 0),
    ],
)
def test_varied_letters_of_a_text(text: str, letters: int) -> None:
    assert plain_text(text).letters == letters


def test_letters_of_a_byte_level_vocabulary() -> None:
    # Twenty ideographs and a part of the next, as GPT-2 spells their bytes.
    spell = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    spelling = spell(HAN[:21])[0][0]
    assert len(spelling) == 63
    assert token_sizes([spelling[:-1]]).letters == 21
    assert token_sizes([HAN[:20]]).letters == 21
    # In whatever order a vocabulary lists its tokens.
    assert token_sizes([HAN[:19], HAN[:20]]) == token_sizes([HAN[:20], HAN[:19]])


LENGTH = 8192
LIMIT = LENGTH * ANY_VOCABULARY.longest
TEXT = "x" * (LIMIT + 1)


@pytest.mark.parametrize(
    ("kind", "body", "length", "is_refused"),
    [
        (COMPLETIONS, {"prompt": TEXT}, LENGTH, True),
        (COMPLETIONS, {"prompt": TEXT[1:]}, LENGTH, False),
        (COMPLETIONS, {"prompt": TEXT}, None, False),
        (COMPLETIONS, {"prompt": TEXT, "truncate_prompt_tokens": 5}, LENGTH, False),
        (COMPLETIONS, {"prompt": "x" * (EXHAUSTING // 2)}, 1, False),
        (CHAT, {"messages": [user(TEXT)]}, LENGTH, True),
        (CHAT, {"messages": [{"role": "assistant", "content": TEXT}]}, LENGTH, False),
        (RESPONSES, {"input": [user(TEXT)]}, LENGTH, True),
        (MESSAGES, {"messages": [user(TEXT)]}, LENGTH, True),
        (CHAT, {"messages": [user("four")], "unread": TEXT}, LENGTH, False),
    ],
)
def test_a_body_whose_text_cannot_fit(
    kind: RequestKind, body: dict[str, Any], length: int | None, is_refused: bool
) -> None:
    data = json.dumps(body)
    problem = length_problem(kind, _members.decode(data), len(data), length)
    assert (problem is not None) is is_refused


@pytest.mark.parametrize(
    ("models", "length"),
    [
        (b'{"data": [{"id": "m", "max_model_len": 64}]}', 64),
        (b'{"data": [{"max_model_len": 64}, {"max_model_len": 128}]}', 128),
        (b'{"data": [{"max_model_len": 64}, {"max_model_len": null, "parent": "m"}]}', 64),
        (b'{"data": [{"max_model_len": 64}, {"id": "other"}]}', None),
        (b'{"data": [{"max_model_len": "64"}]}', None),
        (b'{"data": []}', None),
        (b"{}", None),
        (b"", None),
    ],
)
def test_the_length_that_an_engine_lists(models: bytes, length: int | None) -> None:
    assert engine_length(models) == length
