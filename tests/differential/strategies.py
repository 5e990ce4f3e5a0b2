"""Bodies in which parsers may differ: JSON, forms and codings."""

import gzip
import zlib
from collections.abc import Callable
from typing import Final

from hypothesis import strategies as st

from tandem_contract.request_kinds import RequestKind
from tandem_contract.transfer_params import CLIENT_FORBIDDEN

_NAMES: Final = (
    *("model", "stream", "n", "max_tokens", "max_completion_tokens", "max_output_tokens"),
    *("vllm_xargs", "extra_args", "sampling_params", "best_of", "seed", "unknown"),
    *sorted(CLIENT_FORBIDDEN),
)
_VALUES: Final = (
    *("null", "true", "false", "0", "1", "2", "-1", "1.0", "2.5", "1e1", "1E400", "-0", "[]", "{}"),
    *('"m"', '""', '"1"', '" 2 "', '"1_0"', '"true"', '"on"', '"yes"', '"\\u0031"', '"é"', "[1]"),
    *(
        '{"do_remote_prefill": true, "remote_host": "h"}',
        "9" * 400,
        '"\\ud83d\\ude00"',
        '"\\u0000"',
    ),
    *("9223372036854775808", "18446744073709551616", '"\\u2028"', '"\\/"'),
)
_ODD_VALUES: Final = (
    *("01", "NaN", "-Infinity", "9" * 5000, "+1", ".5", "1.", "True", "// x\n1", '"a\tb"'),
    *('"\\ud800"', '"\\x41"', "'a'", "[" * 600 + "]" * 600, "[1,]", '{"a": 1,}', "1 2", "1e", ""),
)


def _mostly(usual: st.SearchStrategy[str], odd: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """`odd` once in sixteen times: a body with several odd things is refused for one of them."""
    return st.integers(0, 15).flatmap(lambda number: odd if number == 15 else usual)


@st.composite
def _escaped(draw: st.DrawFn, name: str) -> str:
    """A key, of which characters may be escapes."""
    return "".join(
        draw(st.sampled_from((char, char, f"\\u{ord(char):04x}", f"\\u{ord(char):04X}")))
        for char in name
    )


@st.composite
def _renamed(draw: st.DrawFn, name: str) -> str:
    """Another key, which looks like the name."""
    more = st.sampled_from((" ", "\\u0000", "\\ufeff", "\\u200b", "s"))
    return draw(st.sampled_from((name.upper(), name + draw(more), draw(more) + name)))


_name: Final = st.sampled_from(_NAMES)
_key: Final = _mostly(_name | _name.flatmap(_escaped), _name.flatmap(_renamed))
_value: Final = _mostly(st.sampled_from(_VALUES), st.sampled_from(_ODD_VALUES))
_space: Final = _mostly(
    st.sampled_from(("", " ", "\n", "\t", "\r\n")),
    st.sampled_from(("\x0c", "\xa0", ",", "/**/", "\0")),
)
_object: Final = st.lists(st.tuples(_key, _value), max_size=3).map(
    lambda members: "{" + ",".join(f'"{key}":{value}' for key, value in members) + "}"
)


@st.composite
def _member(draw: st.DrawFn) -> str:
    """A member whose value often has the right type."""
    name = draw(_name)
    right = {
        "model": ('"m"', '"x"', '"\\u006d"', "null"),
        "stream": ("true", "false", '"on"', "1", "0.0", '" Yes "', "null"),
        "kv_transfer_params": ('{"do_remote_prefill": true}', "null"),
        "vllm_xargs": (draw(_object), '{"kv_transfer_params": {"a": 1}}'),
        "extra_args": (draw(_object), '{"request_id": "a"}'),
        "sampling_params": (draw(_object), '{"extra_args": {"kv_transfer_params": {"a": 1}}}'),
    }
    numbers = ("1", "2", "1.0", '"3"', '" 4 "', "1e1", "true", "-1", "9" * 20, '"1_0"', "null")
    usual = st.sampled_from(right.get(name, numbers))
    key = draw(_mostly(st.just(name) | _escaped(name), _renamed(name)))
    return f'"{key}"{draw(_space)}:{draw(_mostly(usual, _value))}'


_PROMPTS: Final = {
    RequestKind.COMPLETIONS: '"prompt": "p"',
    RequestKind.CHAT: '"messages": [{"role": "user", "content": "p"}]',
    RequestKind.RESPONSES: '"input": "p"',
    RequestKind.MESSAGES: '"messages": [{"role": "user", "content": "p"}], "max_tokens": 3'
    ', "model": "m"',
    RequestKind.GENERATE: '"token_ids": [1], "sampling_params": {}',
}
_ENCODINGS: Final = _mostly(
    st.just("utf-8"), st.sampled_from(("utf-8-sig", "utf-16", "utf-32", "latin-1"))
)


@st.composite
def json_bodies(draw: st.DrawFn) -> tuple[RequestKind, bytes]:
    """The body of a request that generates."""
    kind = draw(st.sampled_from(list(RequestKind)))
    members = draw(st.lists(_member(), max_size=5))
    members.insert(draw(st.integers(0, len(members))), _PROMPTS[kind])
    before, between, after = draw(_space), draw(_space), draw(_space)
    text = before + "{" + f"{between},".join(members) + "}" + after
    return kind, text.encode(draw(_ENCODINGS), "replace")


_USUAL_TYPES: Final = (
    "multipart/form-data; boundary=B",
    'multipart/form-data; boundary="B"',
    "Multipart/Form-Data;boundary=B",
    "multipart/form-data; boundary=B; charset=utf-8",
)
_TYPES: Final = (
    *("multipart/form-data; BOUNDARY=B", "multipart/form-data; boundary=C; boundary=B"),
    *("multipart/form-data; boundary*0=B", "multipart/form-data; boundary*=utf-8''B"),
    *("multipart/mixed; boundary=B", "multipart/form-data; boundary=B; x=y"),
    *("multipart/form-data; boundary=B; charset=utf-7", "multipart/form-data; boundary=B "),
    *("multipart/form-data; boundary=B; charset=latin-1", "multipart/form-data; boundary=B, x"),
    *("text/plain, multipart/form-data; boundary=B", 'multipart/form-data; boundary="\\B"'),
)
_FIELDS: Final = ("model", "vllm_xargs", "kv_transfer_params", "language", "file")


def _one(usual: tuple[str, ...], odd: tuple[str, ...]) -> st.SearchStrategy[str]:
    return _mostly(st.sampled_from(usual), st.sampled_from(odd))


_parameter_name: Final = _one(("name",), ("filename", "NAME", "Name", "x"))


@st.composite
def _parameter(draw: st.DrawFn) -> str:
    """A parameter that names a part or its file, in one of the ways that standards know."""
    name, value = draw(_parameter_name), draw(st.sampled_from(_FIELDS))
    if draw(st.integers(0, 3)) < 3:
        return draw(st.sampled_from((f'{name}="{value}"', f"{name}={value}")))
    cut = draw(st.integers(1, len(value) - 1))
    encoded = f"{value[:cut]}%{ord(value[cut]):02x}{value[cut + 1 :]}"
    ways = (
        f"{name} = {value}",
        f"{name}='{value}'",
        f"{name}*=utf-8''{encoded}",
        f"{name}*0={value[:cut]}; {name}*1={value[cut:]}",
        f'{name}="x"; {name}*0="{value[:cut]}"; {name}*1*={value[cut:]}',
        f'{name}="{value[:cut]}\\{value[cut:]}"',
        f'{name}="{encoded}"',
        f'{name}="{value}";',
        f'{name}="x\\"; {name}="{value}',
        f'{name}="x"; {name}="{value}"',
    )
    return draw(st.sampled_from(ways))


@st.composite
def _part(draw: st.DrawFn) -> str:
    separator = draw(_one(("; ", ";"), (";\r\n ", "; ; ", " ")))
    parameters = [draw(_parameter())]
    if draw(st.integers(0, 3)) == 0:
        parameters.append(draw(st.just('filename="a"') | _parameter()))
    kind = draw(_one(("form-data", "Form-Data"), ("attachment", "file")))
    header = draw(st.sampled_from(("Content-Disposition", "content-disposition")))
    lines = [f"{header}: {separator.join((kind, *parameters))}"]
    odd = (
        *("Content-Transfer-Encoding: base64", "A", " folded", "A b: c"),
        *(f'Content-Disposition: form-data; name="{name}"' for name in _FIELDS),
    )
    usual = ("Content-Type: text/plain", "Content-Type: text/plain; charset=utf-16", "A: b")
    if draw(st.booleans()):
        lines.append(draw(_one((*usual, "Content-Transfer-Encoding: 8bit"), odd)))
    end = draw(_one(("\r\n",), ("\n", "\r")))
    value = draw(st.sampled_from(("m", "m", "", "größe", "bQ==", "--B", "\r\n--B x", "\r\n", "--")))
    return end.join(draw(st.permutations(lines))) + end + end + value


@st.composite
def forms(draw: st.DrawFn) -> tuple[str, bytes]:
    """A content type and a form."""
    body = draw(_one(("",), ("preamble\r\n", "\r\n", "--B \r\n", "--Bx\r\n")))
    for part in draw(st.lists(_part(), max_size=3)):
        body += draw(_one(("--B\r\n",), ("--B\n", "--B \r\n"))) + part
        body += draw(_one(("\r\n",), ("\n", "", "\r\n \r\n")))
    body += draw(_one(("--B--\r\n", "--B--"), ("--B", "--B--\r\nepilogue\r\n--B\r\n", "--B-")))
    encoding = draw(_one(("utf-8",), ("latin-1",)))
    return draw(_one(_USUAL_TYPES, _TYPES)), body.encode(encoding)


_CODINGS: Final = (b"gzip", b"deflate", b"DEFLATE", b"x-gzip", b"br", b"identity", b"zstd", b"x")
_CODERS: Final[tuple[Callable[[bytes], bytes], ...]] = (
    bytes,
    gzip.compress,
    zlib.compress,
    lambda data: zlib.compress(data, wbits=-15),
)


PLAIN: Final = b'{"prompt": "hello"}'
POLYGLOT: Final = b'{"prompt" :"Sail"}'
"""JSON, and up to its S deflate without a header. No JSON is gzip, whose first byte is 0x1f."""


@st.composite
def coded_requests(draw: st.DrawFn) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and a body that may be coded."""
    headers = []
    for _ in range(draw(st.integers(0, 2))):
        codings = draw(st.lists(st.sampled_from(_CODINGS), max_size=2))
        headers.append((b"content-encoding", b", ".join(codings)))
    types = (b"application/json", b"application/octet-stream", b"text/plain", None)
    if (content_type := draw(st.sampled_from(types))) is not None:
        headers.append((b"content-type", content_type))
    body = draw(st.sampled_from((PLAIN, POLYGLOT)))
    for coder in draw(st.lists(st.sampled_from(_CODERS), max_size=2)):
        body = coder(body)
    return headers, body
