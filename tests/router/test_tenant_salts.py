"""Each JSON body that the router sends to an engine has the salt of its tenant."""

import pytest

from tandem_contract import headers
from tandem_contract.api_paths import API, FORMS

from .conftest import PROMPT, Harness

PATHS = [path.replace("*", "resp_d_1") for path in API if path not in {*FORMS, "/health"}]
FIELDS = {
    "prompt": "x",
    "token_ids": PROMPT,
    "input": "x",
    "texts": ["x"],
    "query": "x",
    "documents": ["x"],
    "tokens": [1],
    "text_1": "x",
    "text_2": ["x"],
    "sampling_params": {},
    "max_tokens": 4,
}
"""What the bodies of all paths need."""


@pytest.mark.parametrize("path", PATHS)
async def test_every_json_body_is_salted_whatever_its_path(harness: Harness, path: str) -> None:
    decode = await harness.decode("d")
    await harness.start(cache_salt={"from_header": "x-tenant"})
    salts = []
    for tenant in ("alice", "bob"):
        body = {"model": "m", **FIELDS, "cache_salt": "alice's"}
        await harness.ask(body, path, headers={"x-tenant": tenant})
        sent = decode.requests[-1]
        assert sent.target == path
        salts.append(sent.json["cache_salt"])
    assert len({*salts, "alice's"}) == 3


async def test_no_client_chooses_its_tenant_by_a_header_of_tandem(harness: Harness) -> None:
    decode = await harness.decode("d")
    await harness.start(cache_salt={"from_header": headers.CLIENT})
    for sent in ({}, {headers.CLIENT: "alice"}, {headers.CLIENT: "bob"}):
        await harness.ask(headers=sent)
    assert len({request.json["cache_salt"] for request in decode.requests}) == 1


async def test_what_can_get_no_salt_reaches_no_engine(harness: Harness) -> None:
    decode = await harness.decode("d")
    await harness.start(cache_salt={"from_header": "x-tenant"})
    url = harness.url("/v1/chat/completions/batch")
    for body, kind, status in (
        (b"{}", "text/plain", 415),
        (b'{"cache_salt": "x", "a": NaN}', "application/json", 400),
    ):
        async with harness.http.post(url, data=body, headers={"content-type": kind}) as answer:
            assert answer.status == status
    assert decode.requests == []
