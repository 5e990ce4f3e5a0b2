"""What generates, and its prefill leg."""

import json
from typing import Any

import pytest

from tandem_sidecar.bodies.kinds import Kind, capped, kind_of
from tandem_sidecar.bodies.parse import parse_body


@pytest.mark.parametrize(
    ("method", "target", "kind"),
    [
        (b"POST", b"/v1/completions", Kind.COMPLETIONS),
        (b"POST", b"/v1/chat/completions?x=1", Kind.CHAT),
        (b"POST", b"/v1/responses", Kind.RESPONSES),
        (b"POST", b"/v1/messages", Kind.MESSAGES),
        (b"POST", b"/inference/v1/generate", Kind.GENERATE),
        (b"GET", b"/v1/completions", None),
        (b"GET", b"/v1/responses/resp_1", None),
        (b"POST", b"/v1/responses/resp_1/cancel", None),
        (b"POST", b"/v1/completions/", None),
        (b"POST", b"/v1/messages/count_tokens", None),
        (b"POST", b"/v1/embeddings", None),
    ],
)
def test_kind(method: bytes, target: bytes, kind: Kind | None) -> None:
    assert kind_of(method, target) is kind


CLIENT = {
    "model": "m",
    "stream": True,
    "stream_options": {"include_usage": True},
    "stop": ["x"],
    "stop_token_ids": [1],
    "return_token_ids": True,
    "tools": [{"type": "function"}],
    "seed": 9007199254740993,
    "thinking": {"type": "enabled", "budget_tokens": 2048},
}
KEPT = {"model": "m", "tools": [{"type": "function"}], "seed": 9007199254740993}


def leg(kind: Kind, **more: Any) -> dict[str, Any]:
    data = capped(kind, parse_body(json.dumps(CLIENT | more).encode()), {"added": 1})
    parsed: dict[str, Any] = json.loads(data)
    return parsed


@pytest.mark.parametrize(
    ("kind", "given", "cap"),
    [
        (
            Kind.COMPLETIONS,
            {"max_tokens": 100, "min_tokens": 5},
            {"stream": False, "max_tokens": 1, "min_tokens": 1, "ignore_eos": True},
        ),
        (
            Kind.CHAT,
            {"max_completion_tokens": 100},
            {
                "stream": False,
                "max_tokens": 1,
                "max_completion_tokens": 1,
                "min_tokens": 1,
                "ignore_eos": True,
            },
        ),
    ],
)
def test_prefill_makes_one_token(kind: Kind, given: dict[str, Any], cap: dict[str, Any]) -> None:
    assert leg(kind, **given) == KEPT | {"thinking": CLIENT["thinking"], "added": 1} | cap


def test_prefill_of_responses_stores_nothing() -> None:
    made = leg(Kind.RESPONSES, max_output_tokens=100, store=True, background=False)
    assert (made["max_output_tokens"], made["ignore_eos"], made["stream"]) == (1, True, False)
    assert (made["store"], made["background"]) == (False, False)
    assert "stop" not in made
    assert "max_tokens" not in made


def test_prefill_of_messages_keeps_to_their_schema() -> None:
    made = leg(Kind.MESSAGES, max_tokens=4096, stop_sequences=["x"])
    assert (made["max_tokens"], made["stream"]) == (1, False)
    assert made["thinking"] == CLIENT["thinking"]
    assert not {"stop_sequences", "min_tokens", "ignore_eos"} & made.keys()


def test_prefill_of_generate_is_capped_where_it_keeps_its_sampling() -> None:
    sampling = {"seed": 9007199254740993, "max_tokens": 9, "stop": ["x"], "stop_token_ids": [1]}
    made = leg(Kind.GENERATE, sampling_params=sampling, token_ids=[1, 2])
    assert made["sampling_params"] == {
        "seed": 9007199254740993,
        "max_tokens": 1,
        "min_tokens": 1,
        "ignore_eos": True,
    }
    assert made["stream"] is False
    assert not {"max_tokens", "stream_options", "return_token_ids"} & made.keys()
    assert leg(Kind.GENERATE, sampling_params=7)["sampling_params"] == 7
    assert "sampling_params" not in leg(Kind.GENERATE)


def test_the_hand_offs_own_members_stand() -> None:
    body = parse_body(b'{"return_token_ids":false,"stream":true}')
    assert capped(Kind.CHAT, body, {"return_token_ids": True}).endswith(b'"return_token_ids":true}')
