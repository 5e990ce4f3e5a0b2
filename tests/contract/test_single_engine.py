"""The rules by which one engine must serve a request alone.

`tests/sidecar/bodies/test_kinds.py` has the cases of each rule. The tests below check the table.
"""

import json

import msgspec
import pytest
from msgspec import Raw

from tandem_contract import single_engine
from tandem_contract.request_kinds import PATHS, RequestKind, kind_of_path
from tandem_contract.single_engine import FIELDS, RULES, single_engine_reason


def reason(kind: RequestKind, **fields: object) -> str | None:
    body = json.dumps(fields).encode()
    return single_engine_reason(kind, body, msgspec.json.decode(body, type=dict[str, Raw]))


def test_every_reason_is_explained() -> None:
    assert single_engine.__doc__ is not None
    assert all(rule.reason in single_engine.__doc__ for rule in RULES)


def test_a_null_keeps_no_request_on_one_engine() -> None:
    for kind, fields in FIELDS.items():
        assert reason(kind, **dict.fromkeys(fields)) is None


def test_a_field_counts_only_in_the_kinds_that_have_it() -> None:
    batch = {"prompt": ["first", "second"]}
    assert reason(RequestKind.COMPLETIONS, **batch) == "batch"
    assert reason(RequestKind.CHAT, **batch) is None


@pytest.mark.parametrize(
    ("url", "expected"),
    [("data:image/png;base64,AAAA", None), ("https://host/image.png", "media_by_url")],
)
def test_inline_media_may_be_split_and_a_url_may_not(url: str, expected: str | None) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    messages = [{"role": "user", "content": [part]}]
    assert reason(RequestKind.CHAT, messages=messages) == expected


def test_an_echo_without_logprobs_may_be_split() -> None:
    assert reason(RequestKind.COMPLETIONS, echo=True) is None
    assert reason(RequestKind.COMPLETIONS, echo=True, logprobs=None) is None
    assert reason(RequestKind.COMPLETIONS, echo=True, logprobs=1) == "echo_logprobs"
    assert reason(RequestKind.CHAT, echo=True) == "echo_logprobs"


def test_a_nesting_too_deep_to_decode_is_an_error() -> None:
    body = b'{"messages": ' + b"[" * 100_000 + b'"image_url"'
    members = {"messages": Raw(b"[" * 100_000)}
    with pytest.raises((RecursionError, msgspec.DecodeError)):
        single_engine_reason(RequestKind.CHAT, body, members)


def test_every_kind_has_a_path_of_its_own() -> None:
    assert {kind_of_path(path) for path in PATHS.values()} == set(RequestKind)
    assert kind_of_path("/v1/chat/completions?beta=1") is RequestKind.CHAT
    assert kind_of_path("/v1/embeddings") is None
