"""Fields that a client may not set, at every place where vLLM would read them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_sidecar.bodies.parse import BadBody, clean_passthrough, parse_body

EXACT = b' { "z":1, "n" :9007199254740993,"a":[ 1.0,2e5 ],\t"u\\u00e9":"\\/" }\n'


def test_a_body_without_forbidden_fields_keeps_its_bytes() -> None:
    assert parse_body(EXACT).data is EXACT


SMUGGLED = [
    b'{"kv_transfer_params":{"do_remote_prefill":true},"a":12345678901234567890}',
    b'{"a":12345678901234567890,"kv_transfer_params":1,"kv_transfer_params":2}',
    b'{"kv_transfer_params":null,"a":12345678901234567890,"kv_transfer\\u005fparams":{}}',
    b'{"request_id":"x","ec_transfer_params":{},"a":12345678901234567890}',
    b'{"\\u0072equest_id":"x","a":12345678901234567890}',
]


@pytest.mark.parametrize("data", SMUGGLED)
def test_every_occurrence_of_a_forbidden_field_is_removed(data: bytes) -> None:
    assert parse_body(data).data == b'{"a":12345678901234567890}'
    assert clean_passthrough(data, b"application/json") == b'{"a":12345678901234567890}'


NESTED = [
    (b'{"a":1,"vllm_xargs":%b,"c":2}', b'{"kv_transfer_params":"x","b":1e400}', b'{"b":1e400}'),
    (b'{"a":1,"vllm_xargs":%b,"c":2}', b'{"ec_transfer_params":[1],"b":7}', b'{"b":7}'),
    (b'{"extra_args":%b}', b'{"kv_transfer_params":{"do_remote_prefill":true}}', b"{}"),
    (b'{"sampling_params":%b}', b'{"n":1,"kv_transfer_params":{}}', b'{"n":1}'),
    (
        b'{"sampling_params":%b,"token_ids":[1]}',
        b'{"n":9007199254740993,"extra_args":{"kv_transfer_params":{},"x":1.50}}',
        b'{"n":9007199254740993,"extra_args":{"x":1.50}}',
    ),
]


@pytest.mark.parametrize(("outer", "member", "expected"), NESTED)
def test_forbidden_fields_are_removed_where_vllm_reads_them(
    outer: bytes, member: bytes, expected: bytes
) -> None:
    assert parse_body(outer % member).data == outer % expected


@pytest.mark.parametrize(
    "harmless",
    [
        b'{"vllm_xargs": {"b": 1}}',
        b'{"vllm_xargs": [1], "sampling_params": null, "extra_args": "kv_transfer_params"}',
        b'{"sampling_params": {"extra_args": {"a": 1}, "seed": 1}}',
        b'{"messages": [{"content": "kv_transfer_params", "request_id": 1}]}',
    ],
)
def test_nested_objects_without_forbidden_fields_keep_their_bytes(harmless: bytes) -> None:
    assert parse_body(harmless).data is harmless


REFUSED = [
    b"",
    b"[]",
    b"{",
    b'{"a": NaN, "kv_transfer_params": {}}',
    b'\xef\xbb\xbf{"kv_transfer_params": {}}',
    '{"kv_transfer_params": {}}'.encode("utf-16"),
    b"{'a': 1}",
    b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"\xff": 1}',
]


@pytest.mark.parametrize("data", REFUSED)
def test_ambiguous_json_is_refused(data: bytes) -> None:
    with pytest.raises(BadBody):
        parse_body(data)


def test_passthrough_keeps_json_that_is_not_an_object() -> None:
    form = FORM % b'name="a"'
    assert clean_passthrough(form, b"multipart/form-data; boundary=x") is form
    assert clean_passthrough(b"[1, 2]", b"application/json") == b"[1, 2]"
    assert clean_passthrough(b"", b"") == b""


FILES = [
    bytes(range(256)),
    b"\xff\xfe{\0}\0",
    b'{"request_id": 1}\n{"request_id": 2}',
    b"plain words",
]
CLAIMED = [b"", b"application/json", b"Application/JSON; charset=utf-8", b"application/x+json"]
GUESSED = [b"text/plain;charset=UTF-8", b"application/x-www-form-urlencoded"]
OPAQUE = [b"application/octet-stream", b"audio/wav", b"application/gzip"]


@pytest.mark.parametrize("data", FILES)
@pytest.mark.parametrize("content_type", [*GUESSED, *OPAQUE])
def test_a_file_passes_unchanged(data: bytes, content_type: bytes) -> None:
    assert clean_passthrough(data, content_type) is data


@pytest.mark.parametrize("content_type", CLAIMED)
@pytest.mark.parametrize("data", [*FILES, b'{"a": NaN}'])
def test_a_body_that_an_engine_parses_as_json_must_be_valid(
    data: bytes, content_type: bytes
) -> None:
    with pytest.raises(BadBody):
        clean_passthrough(data, content_type)


@pytest.mark.parametrize("content_type", [*CLAIMED, *GUESSED])
def test_a_body_that_may_be_parsed_as_json_is_cleaned(content_type: bytes) -> None:
    data = b'{"request_id": 7, "a": 1.50}'
    assert clean_passthrough(data, content_type) == b'{"a":1.50}'


@pytest.mark.parametrize("content_type", OPAQUE)
def test_a_json_file_keeps_its_members(content_type: bytes) -> None:
    data = b'{"request_id": 7}'
    assert clean_passthrough(data, content_type) is data


FORM = b'--x\r\nContent-Disposition: form-data; %b\r\n\r\n{"kv_transfer_params": "x"}\r\n--x--\r\n'


@pytest.mark.parametrize(
    "name",
    [
        b'name="vllm_xargs"',
        b"name=vllm_xargs",
        b'name="VLLM_xargs"; filename="a"',
        b'name="kv_transfer_params"',
        b'name="request_id"',
    ],
)
def test_a_form_may_not_set_forbidden_fields(name: bytes) -> None:
    with pytest.raises(BadBody, match="cannot be set in a form: remove it"):
        clean_passthrough(FORM % name, b"Multipart/form-data; boundary=x")


@pytest.mark.parametrize(
    "name",
    [
        b'name="vllm\\_xargs"',
        b"name*=u''vllm%5Fxargs",
        b"name*0=vllm_; name*1=xargs",
        b'name="a"; name*0=vllm_; name*1=xargs',
        b"name=a; name=vllm_xargs",
        b'name="a"\r\nContent-Disposition: form-data; name="vllm_xargs"',
        b'\nx; name="vllm_xargs"',
        b'\r\n name="vllm_xargs"',
    ],
)
def test_a_form_that_parsers_read_differently_is_refused(name: bytes) -> None:
    with pytest.raises(BadBody, match=r"part 1 of the form \(byte 5\)"):
        clean_passthrough(FORM % name, b"Multipart/form-data; boundary=x")


def test_only_forms_are_multipart() -> None:
    form = FORM % b'name="a"'
    for content_type in (b"multipart/mixed; boundary=x", b"multipart/form-data, text/plain"):
        with pytest.raises(BadBody, match="send multipart/form-data"):
            clean_passthrough(form, content_type)


@pytest.mark.parametrize(
    ("charset", "is_accepted"),
    [
        (b"utf-8", True),
        (b'"UTF-8"', True),
        (b"iso-8859-1", False),
        (b"utf-7", False),
        (b"utf-8; charset=cp037", False),
        (b'"utf\\-7"', False),
    ],
)
def test_a_form_in_another_charset_is_refused(charset: bytes, is_accepted: bool) -> None:
    """Starlette decodes names by the charset: in UTF-7 this name is vllm_xargs."""
    form, content_type = (
        FORM % b'name="vllm+AF8-xargs"',
        b"multipart/form-data; boundary=x; charset=",
    )
    if is_accepted:
        assert clean_passthrough(form, content_type + charset) is form
    else:
        with pytest.raises(BadBody, match="charset"):
            clean_passthrough(form, content_type + charset)


TEXT = st.text('aZ_é"\\ \n\u2028\U0001f600', max_size=4)
SCALAR = st.none() | st.booleans() | st.integers() | TEXT
JSON = SCALAR | st.lists(SCALAR, max_size=3) | st.dictionaries(TEXT, SCALAR, max_size=3)
FORBIDDEN = {"kv_transfer_params", "ec_transfer_params", "request_id"}


@settings(max_examples=60)
@given(
    st.dictionaries(TEXT | st.sampled_from(sorted(FORBIDDEN)), JSON, max_size=4),
    st.dictionaries(TEXT | st.sampled_from(sorted(FORBIDDEN)), JSON, max_size=4),
    st.integers(0, 3),
)
def test_only_forbidden_fields_are_removed(
    members: dict[str, object], inner: dict[str, object], indent: int
) -> None:
    sampling = {"top_p": 0.5, "extra_args": inner}
    sent = members | {"sampling_params": sampling, "vllm_xargs": inner}
    data = parse_body(json.dumps(sent, indent=indent).encode()).data
    kept_inner = {k: v for k, v in inner.items() if k not in FORBIDDEN}
    expected = {k: v for k, v in members.items() if k not in FORBIDDEN} | {
        "sampling_params": {"top_p": 0.5, "extra_args": kept_inner},
        "vllm_xargs": kept_inner,
    }
    assert list(json.loads(data).items()) == list(expected.items())


@pytest.mark.parametrize(
    "inner",
    [
        b'"vllm_xargs": {"x": 1}, "vllm_xargs": {"kv_transfer_params": 1, "x": 2}',
        b'"vllm_xargs": {"kv_transfer_params": 1}, "vllm_xargs": {"x": 2}',
        b'"vllm_xargs": {"x": 2, "kv_transfer_params": 1, "kv_transfer_params": {"y": 1}}',
        b'"vllm_xargs": {"x": 2}, "kv_transfer_params": 1, "kv_transfer\\u005fparams": 2',
    ],
)
def test_of_repeated_keys_the_last_counts_and_no_forbidden_one_stays(inner: bytes) -> None:
    body = parse_body(b'{"model": "a", %b, "model": "b"}' % inner)
    # The engine's parser: the last of repeated keys counts.
    assert json.loads(body.data) == {"model": "b", "vllm_xargs": {"x": 2}}
