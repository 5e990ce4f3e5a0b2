"""Media and cache_control in a conversation's prefix key."""

import base64
import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract import headers as wire
from tandem_contract.request_kinds import RequestKind
from tandem_contract.timing import Timing
from tandem_epp.exchange import HttpRequest, ResponseHeaders
from tandem_epp.placement.placement import Placement
from tandem_epp.request.inference import InferenceRequest, parse_request
from tandem_epp.request.prompt_key import PromptForm

from ..placement.test_picker import PickerSetup

RANDOM = Random(5)
PICTURES = [base64.b64encode(RANDOM.randbytes(60_000)).decode() for _ in range(2)]
BEFORE = "Look at this picture. " * 40


def chat_part(data: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def sound_part(data: str) -> dict[str, object]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def responses_part(data: str) -> dict[str, object]:
    return {"type": "input_image", "image_url": f"data:image/png;base64,{data}"}


def messages_part(data: str) -> dict[str, object]:
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return {"type": "image", "source": source}


def tool_result(data: str) -> dict[str, object]:
    return {"type": "tool_result", "tool_use_id": "t", "content": [messages_part(data)]}


def embeds_part(data: str) -> dict[str, object]:
    return {"type": "image_embeds", "image_embeds": data}


PARTS = [
    (RequestKind.CHAT, chat_part),
    (RequestKind.CHAT, sound_part),
    (RequestKind.CHAT, embeds_part),
    (RequestKind.RESPONSES, responses_part),
    (RequestKind.MESSAGES, messages_part),
    (RequestKind.MESSAGES, tool_result),
]
TURNS = {RequestKind.RESPONSES: "input"}


def parsed(kind: RequestKind, *turns: object, indent: int | None = None) -> InferenceRequest:
    body = {"model": "m", TURNS.get(kind, "messages"): list(turns)}
    return parse_request(kind, json.dumps(body, indent=indent).encode())


def turn(*parts: object) -> dict[str, object]:
    return {"role": "user", "content": [{"type": "text", "text": BEFORE}, *parts]}


def shared(first: InferenceRequest, second: InferenceRequest) -> int:
    return sum(a == b for a, b in zip(first.chain, second.chain, strict=False))


@pytest.mark.parametrize(("kind", "part"), PARTS)
@pytest.mark.parametrize("indent", [None, 2])
def test_a_media_part_counts_as_one_block_by_its_content(
    kind: RequestKind, part: "object", indent: int | None
) -> None:
    assert callable(part)
    plain = parsed(kind, turn(), indent=indent)
    first, second = (parsed(kind, turn(part(data)), indent=indent) for data in PICTURES)
    assert len(plain.chain) < len(first.chain) <= len(plain.chain) + 8
    assert first.prompt_tokens < plain.prompt_tokens + 120
    assert len(plain.chain) - 1 <= shared(first, second) < len(first.chain)
    again = parsed(
        kind, turn(part(PICTURES[0])), {"role": "user", "content": "And?" * 40}, indent=indent
    )
    assert shared(first, again) >= len(first.chain) - 1
    assert shared(again, parsed(kind, turn(part(PICTURES[0])), indent=indent)) == len(first.chain)


TEXTS = st.text(max_size=30)
CONTENTS = st.one_of(
    TEXTS,
    st.lists(
        st.one_of(
            TEXTS.map(lambda text: {"type": "text", "text": text}),
            st.sampled_from(PICTURES).map(chat_part),
            st.just({"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}),
        ),
        max_size=4,
    ),
)


@given(st.lists(CONTENTS, min_size=1, max_size=6), st.sampled_from([None, 1]))
def test_a_conversation_that_grows_continues_its_key(
    contents: list[object], indent: int | None
) -> None:
    turns = [{"role": "user", "content": content} for content in contents]
    grown = parsed(RequestKind.CHAT, *turns, indent=indent)
    for number in range(1, len(turns)):
        assert grown.prompt.startswith(
            parsed(RequestKind.CHAT, *turns[:number], indent=indent).prompt
        )
    pictures = sum(
        part.get("type") == "image_url"
        for content in contents if isinstance(content, list)
        for part in content
    )  # fmt: skip
    assert (grown.form is PromptForm.MEDIA) == (pictures > 0)
    assert b"cache_control" not in grown.prompt
    assert len(grown.prompt) < 5000


def test_a_conversation_of_texts_keeps_its_prefix_when_a_picture_follows() -> None:
    texts = parsed(RequestKind.CHAT, {"role": "user", "content": BEFORE})
    pictures = parsed(
        RequestKind.CHAT, {"role": "user", "content": BEFORE}, turn(*map(chat_part, PICTURES))
    )
    assert shared(texts, pictures) == len(texts.chain)


def test_the_order_of_pictures_and_a_repeated_one_matter() -> None:
    first, second = map(chat_part, PICTURES)
    one = parsed(RequestKind.CHAT, turn(first, second, first))
    other = parsed(RequestKind.CHAT, turn(second, first, first))
    assert shared(one, other) < len(one.chain) - 2
    assert one.prompt_tokens == other.prompt_tokens < 1000


def test_long_strings_in_texts_are_no_media() -> None:
    text = json.dumps(chat_part(PICTURES[0]))
    request = parsed(RequestKind.CHAT, {"role": "user", "content": text})
    assert request.prompt_tokens > 15_000


@pytest.mark.parametrize(
    "content",
    [["text"], [["x"]], [{"image_url": None}], {"image_url": "x" * 100}, [{"source": {}}], None, 7],
)
def test_unusual_contents_are_hashed_as_they_are(content: object) -> None:
    request = parsed(RequestKind.CHAT, {"role": "user", "content": content})
    assert request.prompt_tokens > 5


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("indent", [None, 2])
def test_moving_cache_control_keeps_the_prefix(is_first: bool, indent: int | None) -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
    text = {"type": "text", "text": BEFORE}
    marked = {**mark, **text} if is_first else {**text, **mark}
    first = parsed(RequestKind.MESSAGES, {"role": "user", "content": [marked]}, indent=indent)
    second = parsed(
        RequestKind.MESSAGES,
        {"role": "user", "content": [text]},
        {"role": "user", "content": [{**text, "cache_control": None}]},
        indent=indent,
    )
    unmarked = parsed(RequestKind.MESSAGES, {"role": "user", "content": [text]}, indent=indent)
    assert shared(first, second) == len(first.chain)
    assert first.prompt == unmarked.prompt
    assert b"cache_control" not in second.prompt


def test_a_conversation_of_very_many_parts_is_hashed_as_it_came() -> None:
    text = {"type": "text", "text": "x"}
    few, many = (
        parsed(RequestKind.CHAT, {"role": "user", "content": [chat_part(PICTURES[0]), *[text] * n]})
        for n in (19_000, 21_000)
    )
    assert few.prompt_tokens < many.prompt_tokens - 20_000
    assert many.form is PromptForm.OTHER


def test_media_by_url_count_by_their_url() -> None:
    urls = [f"https://example.org/{number}/{'x' * 300}.png" for number in range(2)]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    first, second = (parsed(RequestKind.CHAT, turn(part)) for part in parts)
    assert len(first.chain) - 3 <= shared(first, second) < len(first.chain)
    assert first.single_engine_reason == "media_by_url"


@pytest.mark.parametrize("pictures", [1, 3])
def test_media_have_as_many_tokens_as_the_engine_counted_before(pictures: int) -> None:
    """The hash sees 16 tokens in place of each; this engine makes 1,000 of it."""
    setup = PickerSetup(d="unified")

    def place(number: int) -> Placement:
        parts = [chat_part(f"{number}{i}{PICTURES[0]}") for i in range(pictures)]
        content = [{"type": "text", "text": BEFORE}, *parts]
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]})
        request = HttpRequest("POST", "/v1/chat/completions", {wire.REQUEST_ID: f"r{number}"})
        return setup.picker.place(request, body.encode(), 1e9)

    for number in range(40):
        placement = place(number)
        usage = Timing(leg=0.1, prompt=len(BEFORE) // 4 + 1000 * pictures).encode()
        placement.on_response_headers(ResponseHeaders(usage, 200), 1e9)
        placement.end(1e9)
    # The rest are the messages' braces and names.
    assert place(99).decision.prompt_tokens == pytest.approx(1000 * pictures + 220, abs=120)
