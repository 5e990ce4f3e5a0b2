"""Each tenant's requests get a salt of its own, whatever salt a client sends."""

import json
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tandem_contract.api_paths import API, FORMS, ApiPaths
from tandem_epp.exchange import HttpRequest, NotPlaced, ResponseHeaders
from tandem_epp.placement.picker import EndpointPicker
from tandem_epp.placement.placement import Placement
from tandem_epp.request.bodies import kind_of
from tandem_epp.request.large_bodies import LARGE

from ..placement.test_picker import LONG, NOW, PickerSetup

PATHS = [path.replace("*", "resp_1") for path in API if path not in FORMS]
ADDED = "/v1/added"
FIELDS = {
    "prompt": LONG,
    "input": LONG,
    "texts": [LONG],
    "query": LONG,
    "documents": [LONG],
    "text_1": LONG,
    "text_2": [LONG],
    "tokens": [1],
}
"""What the bodies of all paths need."""


@pytest.fixture
def picker() -> EndpointPicker:
    setup = PickerSetup(d="decode", p="prefill")
    routing = replace(setup.picker.routing, api=ApiPaths([ADDED]))
    made = EndpointPicker(setup.fleet, routing, setup.metrics, setup.history, Random(3))
    made.salts.header = "X-Tenant"
    return made


def request(tenant: str | None, path: str = "/v1/completions", **headers: str) -> HttpRequest:
    named = {} if tenant is None else {"x-tenant": tenant}
    return HttpRequest("POST", path, named | headers)


def salt(picker: EndpointPicker, tenant: str | None, **fields: Any) -> str:
    body = {"model": "m", "prompt": "hello", **fields}
    changed = json.loads(picker.placed_body(request(tenant), json.dumps(body).encode()))
    value: str = changed.pop("cache_salt")
    body.pop("cache_salt", None)
    assert changed == body
    return value


def test_a_salt_is_the_tenants_and_depends_on_the_clients_own(picker: EndpointPicker) -> None:
    salts = [
        salt(picker, tenant, **fields)
        for tenant in ("a", "b", "", "2 a")
        for fields in ({}, {"cache_salt": "x"}, {"cache_salt": "y"})
    ]
    assert len(set(salts)) == len(salts)
    assert salt(picker, "a") == salts[0]
    assert salt(picker, None) == salt(picker, "")
    assert salt(picker, "a", cache_salt=None) == salts[0]
    # What another tenant's requests have gives no client that tenant's salt.
    assert salt(picker, "b", cache_salt=salts[0]) != salts[0]
    # vLLM takes at most 128 characters, and not all.
    assert all(len(each) == 64 and each.isalnum() for each in salts)


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        (b'{"prompt":"x", "seed": 9007199254740993}', b'{"prompt":"x", "seed": 9007199254740993,'),
        (b'{"a":{}}', b'{"a":{},'),
        (b" { } ", b" { "),
    ],
)
def test_no_other_byte_changes(picker: EndpointPicker, body: bytes, changed: bytes) -> None:
    salted = picker.placed_body(request("a"), body)
    assert salted == changed + b'"cache_salt":"%b"}' % salt(picker, "a").encode()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [b"[]", b"{", b'"}"', b"7", b'{"cache_salt": "x", "a": NaN}', '{"a": 1}'.encode("utf-16")],
)
def test_what_is_no_object_is_refused_on_every_path(
    picker: EndpointPicker, path: str, body: bytes
) -> None:
    assert picker.placed_body(request("a", path), body) == body
    with pytest.raises(NotPlaced) as refusal:
        picker.place(request("a", path), body, NOW)
    assert refusal.value.reply.status == 400


def test_a_request_without_a_body_needs_no_salt(picker: EndpointPicker) -> None:
    assert picker.place(request("a", "/v1/responses/resp_1/cancel"), b"", NOW).take_body() is None
    with pytest.raises(NotPlaced) as refusal:
        picker.place(request("a"), b"", NOW)
    assert refusal.value.reply.status == 400


def test_a_large_body_gets_the_salt_of_its_tenant(picker: EndpointPicker) -> None:
    for fields in ({}, {"cache_salt": "x"}):
        body = json.dumps({"model": "m", **fields, "prompt": "x" * LARGE}).encode()
        read = json.loads(picker.placed_body(request("a"), body))
        assert read["cache_salt"] == salt(picker, "a")


def test_no_large_body_is_json_without_its_tenants_salt(picker: EndpointPicker) -> None:
    inner = b'"cache_salt": "x", "a": "%b"' % (b"x" * LARGE)
    broken = [b"[{%b}]", b'{%b, "b": "}"', b'{%b, "b": {}', b"{%b}, {}", b"{%b}{}"]
    asked = request("a", "/generative_scoring")
    for body in broken:
        sent = picker.place(asked, body % inner, NOW).take_body()
        with pytest.raises(json.JSONDecodeError):
            json.loads(sent or b"")
    sent = picker.place(asked, b"{%b} 7" % inner, NOW).take_body()
    assert json.loads(sent or b"")["cache_salt"] == salt(picker, "a")
    with pytest.raises(NotPlaced) as refusal:
        picker.place(asked, b" " * LARGE, NOW)
    assert refusal.value.reply.status == 400


@pytest.mark.parametrize("path", [*PATHS, "/v1/completions?x=1", ADDED])
def test_every_json_body_is_salted_whatever_its_path(picker: EndpointPicker, path: str) -> None:
    for fields in ({}, {"cache_salt": salt(picker, "b")}):
        body = json.dumps({"model": "m", **FIELDS, **fields}).encode()
        asked = request("a", path, **{"content-length": "1"})
        assert picker.needs_body(asked)
        placement = picker.place(asked, body, NOW)
        sent = placement.take_body()
        assert sent is not None
        assert json.loads(sent)["cache_salt"] == salt(picker, "a", **fields)
        assert dict(placement.mutation.set)["content-length"] == str(len(sent))


def test_others_stay_as_they_are(picker: EndpointPicker) -> None:
    body = b'{"model": "m", "prompt": "x"}'
    form = {"content-type": "multipart/form-data; boundary=x"}
    for path in FORMS:
        assert picker.place(request("a", path, **form), b"--x--", NOW).take_body() is None
    picker.salts.header = None
    assert picker.place(request("a"), body, NOW).take_body() is None
    assert not picker.needs_body(request("a", ADDED))


def test_an_unknown_path_is_refused_as_such(picker: EndpointPicker) -> None:
    plain = {"content-type": "text/plain"}
    with pytest.raises(NotPlaced) as refusal:
        picker.place(request("a", "/v1/unknown", **plain), b"{}", NOW)
    assert refusal.value.reply.status == 404


def test_the_prefix_index_expects_no_hit_across_tenants(picker: EndpointPicker) -> None:
    def place(tenant: str) -> Placement:
        body = json.dumps({"model": "m", "prompt": LONG}).encode()
        placement = picker.place(request(tenant), body, NOW)
        placement.on_response_headers(ResponseHeaders(timing=None, status=200), NOW)
        placement.end(NOW)
        return placement

    assert place("a").decision.cached_tokens == 0
    assert place("a").decision.cached_tokens > 0
    assert place("b").decision.cached_tokens == 0


@pytest.mark.parametrize("path", [*PATHS, ADDED])
def test_a_body_that_the_gateway_does_not_send_is_refused(
    picker: EndpointPicker, path: str
) -> None:
    with pytest.raises(NotPlaced) as refusal:
        picker.place(request("a", path), None, NOW)
    assert refusal.value.reply.status == 500


@pytest.mark.parametrize("path", [*PATHS, ADDED])
def test_a_body_that_is_called_a_text_has_a_salt_or_is_refused(
    picker: EndpointPicker, path: str
) -> None:
    asked = request("a", path, **{"content-type": "text/plain"})
    body = json.dumps({"model": "m", **FIELDS}).encode()
    if kind_of(asked) is not None:
        assert "cache_salt" in json.loads(picker.place(asked, body, NOW).take_body() or b"")
        return
    with pytest.raises(NotPlaced) as refusal:
        picker.place(asked, body, NOW)
    assert refusal.value.reply.status == 415
