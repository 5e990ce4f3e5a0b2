"""Forms: the model wherever it stands, files that are skipped, and what is wrong with others."""

import asyncio
from contextlib import suppress

import pytest
from aiohttp import FormData
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_contract.forms import MAX_TYPE
from tandem_epp.exchange import HttpRequest
from tandem_epp.request.bodies import is_form, named_model
from tandem_epp.request.body_fields import BadBody
from tandem_epp.request.form import form_model, with_form_model

pytestmark = pytest.mark.long

PATH = "/v1/audio/transcriptions"
TYPE = "multipart/form-data; boundary=XB"
MODEL = b'Content-Disposition: form-data; name="model"\r\n\r\nm'
FILE = b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'


def form(*parts: bytes) -> bytes:
    return b"".join(b"--XB\r\n" + part + b"\r\n" for part in parts) + b"--XB--\r\n"


FORMS = pytest.mark.parametrize(
    ("body", "model"),
    [
        (form(MODEL), "m"),
        (form(FILE + b"sound", MODEL), "m"),
        (form(MODEL, FILE + b"sound"), "m"),
        (form(MODEL, MODEL + b"2"), "m2"),
        (form(FILE + b"sound"), None),
        (form(), None),
        (form(MODEL[:-1]), ""),
        (form(FILE + b"\r\n--XBC\r\n--X\r\n--XB not\r\n -XB", MODEL), "m"),
        (form(FILE + b"--XB\r\n" + MODEL, MODEL + b"2"), "m2"),
        (
            form(b"CONTENT-DISPOSITION:form-data;name=model\r\nA: b\r\n\r\nm"),
            "m",
        ),
        (form(MODEL[:-1] + "größe".encode()), "größe"),
        (form(MODEL)[:-2], "m"),
        (form(FILE + b"\r\n--XB  \t.", MODEL), "m"),
    ],
)


@FORMS
def test_the_model_is_found_wherever_it_stands(body: bytes, model: str | None) -> None:
    assert form_model(TYPE, body) == model


@FORMS
def test_only_the_model_of_a_form_changes(body: bytes, model: str | None) -> None:
    changed = with_form_model(TYPE, body, "größer")
    assert form_model(TYPE, changed) == "größer"
    if model is None:
        head = b'--XB\r\nContent-Disposition: form-data; name="model"\r\n\r\n'
        assert changed == head + "größer".encode() + b"\r\n" + body
    else:
        assert with_form_model(TYPE, changed, model) == body


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the form does not begin with the boundary of content-type, XB"),
        (b"--XB", "the form does not begin with the boundary"),
        (b'{"model": "m"}', "the form does not begin with the boundary"),
        (b"a preamble\r\n" + form(MODEL), "the form does not begin with the boundary"),
        (b"--XB \t\r\n" + MODEL + b"\r\n--XB--", r"spaces behind its boundary \(byte 4\)"),
        (form(FILE + b"\r\n--XB \r\n" + MODEL), "spaces behind its boundary"),
        (form(MODEL) + b"an epilogue\r\n--XB\r\n", r"behind its last boundary \(byte 63\)"),
        (b"--XB--a\r\n" + form(MODEL), r"behind its last boundary \(byte 6\)"),
        (form(FILE + b"\r\n--XB--a"), "behind its last boundary"),
        (b"--XB\r\n" + MODEL, r"part 1 of the form \(byte 6\): the form ends in it, at byte 55"),
        (form(FILE)[:-4], r"part 1 of the form \(byte 6\): the form ends in it"),
        (form(b"m"), r"part 1 of the form \(byte 6\): it has no head"),
        (form(MODEL, b"\r\nm"), r"part 2 of the form \(byte 63\): it has no head"),
        (form(b"Content-Type: a/b\r\n\r\nm"), "it has 0 Content-Disposition headers: send one"),
        (form(MODEL[:-3] + MODEL), "it has 2 Content-Disposition headers: send one"),
        (form(b"A b: c\r\n" + MODEL), "a line of its head is no header"),
        (form(b"Content-Disposition: form-data;\r\n name=model\r\n\r\nm"), "is no header"),
        (
            form(b"Content-Transfer-Encoding: base64\r\n" + MODEL),
            "it has a Content-Transfer-Encoding: send it as it is",
        ),
        *(
            (form(b"Content-Disposition: %b\r\n\r\nm" % value), "Content-Disposition is not plain")
            for value in (
                b"form-data",
                b"form-data; name=",
                b'form-data; name=""',
                b"file; name=a",
                b"form-data; name*0=mod; name*1=el",
                b"form-data; name*=utf-8''model",
                b'form-data; name="a"; name*0="model"',
                b"form-data; name=a; name=model",
                b"form-data; name=a; NAME=model",
                b"form-data; name =a",
                b'form-data; name="mo\\del"',
                b'form-data; name="%6dodel"',
                b'form-data; name="a"x; filename="b"',
                b"form-data; name=a; filename*=utf-8''b",
                b'form-data; name=a; filename="b\\"; name=\\"model"',
                b"form-data; name=a; size=1",
            )
        ),
        (form(FILE.replace(b"file", b"model", 1)), r"model: a file \(part 1, byte 6\) instead of"),
        (form(MODEL + b"\xff"), r"model: not UTF-8 \(byte 55\)"),
        (form(FILE + b"\r\n--XB!" * 300), "more than 256 times"),
        (form(*[FILE.replace(b"a.wav", b"a" * 1000)] * 9), "part 8 .* more than 8192 bytes"),
        (form(FILE.replace(b"a.wav", b"a" * 9000)), "no head of at most 8192 bytes"),
    ],
)
def test_a_wrong_form_is_refused_with_the_place(body: bytes, message: str) -> None:
    with pytest.raises(BadBody, match=message) as refusal:
        form_model(TYPE, body)
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data",
        "multipart/form-data; charset=utf-8",
        'multipart/form-data; boundary=""',
    ],
)
def test_a_form_needs_a_boundary(content_type: str) -> None:
    with pytest.raises(BadBody, match="content-type names no boundary: send multipart/form-data"):
        form_model(content_type, form(MODEL))


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/mixed; boundary=XB",
        "multipart/form-data, application/json; boundary=XB",
        TYPE + ",XC",
        TYPE + "; boundary=XC",
        TYPE + "; charset=iso-8859-1",
        TYPE + "; charset=utf-8; charset=cp037",
        "multipart/form-data; boundary*0=X; boundary*1=B",
        "multipart/form-data; boundary*=utf-8''XB",
        'multipart/form-data; boundary="X\\B"',
        TYPE + "; a=" + "b" * MAX_TYPE,
    ],
)
def test_a_forms_content_type_is_plain(content_type: str) -> None:
    with pytest.raises(BadBody, match=r"(content-type|form)"):
        form_model(content_type, form(MODEL))
    for plain in (TYPE, TYPE.title().replace("Boundary", "boundary").replace("Xb", "XB")):
        assert form_model(plain + "; charset=UTF-8", form(MODEL)) == "m"
    assert form_model('multipart/form-data;boundary="XB"', form(MODEL)) == "m"


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["model", "language", "timestamp_granularities[]"]),
            st.text(max_size=20),
        )
        | st.tuples(st.just("file"), st.binary(max_size=2000)),
        max_size=8,
    )
)
def test_what_aiohttps_client_writes_is_read(fields: list[tuple[str, str | bytes]]) -> None:
    body, content_type = asyncio.run(written(fields))
    models = [value for name, value in fields if name == "model"]
    assert form_model(content_type, body) == (models[-1] if models else None)


async def written(fields: list[tuple[str, str | bytes]]) -> tuple[bytes, str]:
    """The form as aiohttp's client sends it, and its content type."""
    made = FormData(default_to_multipart=True)
    for name, value in fields:
        made.add_field(name, value, filename="a.wav" if isinstance(value, bytes) else None)
    payload = made()
    return await payload.as_bytes(), payload.headers["Content-Type"]


PIECES = st.sampled_from(
    (
        *(b"--XB", b"--XB--", b"\r\n", b"\r\n--XB\r\n", b"--", b"\r\n\r\n", b" ", MODEL, FILE),
        *(b"Content-Disposition: ", b"form-data", b"; name=model", b'"', b"*1*=", b"*", b"m"),
        *(b"\\", b"\xff", b":", b"; filename*=utf-8''", b"; name*9=", b";", b"9" * 5000, b"\0"),
    )
)


@settings(deadline=None, max_examples=1000)
@given(st.lists(PIECES, max_size=30).map(b"".join), st.text(max_size=40))
def test_any_bytes_are_read_or_refused(body: bytes, content_type: str) -> None:
    for each in (TYPE, content_type, f"multipart/form-data; {content_type}"):
        with suppress(BadBody):
            assert isinstance(form_model(each, body), str | None)
            changed = with_form_model(each, body, "x")
            with suppress(BadBody):
                # It may have too many parts with another one.
                assert form_model(each, changed) == "x"


def test_only_forms_of_the_api_are_read_as_forms() -> None:
    headers = {"content-type": TYPE.replace("multipart", "Multipart")}
    assert is_form(HttpRequest("POST", f"{PATH}?x=1", headers))
    assert named_model(HttpRequest("POST", PATH, {"content-type": TYPE}), form(MODEL)) == "m"
    for request in (
        HttpRequest("GET", PATH, headers),
        HttpRequest("POST", "/v1/embeddings", headers),
        HttpRequest("POST", PATH, {"content-type": "application/json"}),
        HttpRequest("POST", PATH, {}),
    ):
        assert not is_form(request)
