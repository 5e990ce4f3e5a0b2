"""Keys, references and locations: pure."""

import copy
import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract.kv_reference import (
    TENSOR_FORMAT,
    KvReference,
    KvReferenceUnusable,
    read_reference,
)
from tandem_kvstore.errors import LocationError
from tandem_kvstore.format.identity import KvIdentity, Prompt, chunk_keys
from tandem_kvstore.location import Protocol, Secret, StoreCredentials, store_location

from .kv import IDENTITY

TOKENS = tuple(range(100))


def test_keys_are_the_same_on_every_machine() -> None:
    # A change of these values loses all that is stored: raise TENSOR_FORMAT with it.
    keys = chunk_keys(IDENTITY, Prompt(TOKENS))
    assert len(keys) == 3
    assert keys[0].startswith(EXPECTED[0])
    assert keys[2].startswith(EXPECTED[1])


EXPECTED = ("c0fa6a279bcdc350", "3509f5baf010998f")


@pytest.mark.parametrize("field", list(KvIdentity.__struct_fields__))
def test_each_field_of_the_identity_changes_all_keys(field: str) -> None:
    value = getattr(IDENTITY, field)
    if field == "chunk_tokens":
        return
    other: object = value + 1 if isinstance(value, int) else f"{value}x"
    if isinstance(value, tuple):
        other = (1, 2)
    changed = msgspec.structs.replace(IDENTITY, **{field: other})
    mine, others = (chunk_keys(i, Prompt(TOKENS)) for i in (IDENTITY, changed))
    assert not set(mine) & set(others)


@pytest.mark.parametrize(
    "prompt",
    [Prompt(TOKENS, cache_salt="a"), Prompt(TOKENS, adapter="a"),
     Prompt(TOKENS, media=((3, "hash"),)), Prompt(TOKENS, media=((4, "hash"),))],
)  # fmt: skip
def test_salt_adapter_and_media_change_the_keys(prompt: Prompt) -> None:
    plain = chunk_keys(IDENTITY, Prompt(TOKENS))
    assert not set(plain) & set(chunk_keys(IDENTITY, prompt))


def test_media_change_the_keys_from_their_chunk_on() -> None:
    plain = chunk_keys(IDENTITY, Prompt(TOKENS))
    media = chunk_keys(IDENTITY, Prompt(TOKENS, media=((40, "hash"),)))
    assert [a == b for a, b in zip(plain, media, strict=True)] == [True, False, False]


_tokens = st.lists(st.integers(0, 3), max_size=120)


@given(_tokens, _tokens)
def test_equal_keys_mean_equal_prefixes(a: list[int], b: list[int]) -> None:
    keys_a, keys_b = chunk_keys(IDENTITY, Prompt(a)), chunk_keys(IDENTITY, Prompt(b))
    size = IDENTITY.chunk_tokens
    for i, (key_a, key_b) in enumerate(zip(keys_a, keys_b, strict=False), 1):
        assert (key_a == key_b) == (a[: i * size] == b[: i * size])


def test_references_of_other_formats_are_refused_by_name() -> None:
    key = "a" * 64
    good = msgspec.to_builtins(KvReference(f"ns/{key}", key, 512))
    assert read_reference(good).token_count == 512
    with pytest.raises(KvReferenceUnusable, match=f"'tandem-kv/0'.*{TENSOR_FORMAT}"):
        read_reference({**good, "tensor_format": "tandem-kv/0"})
    for wrong in (
        {"prefix_hash": "x"},
        {"token_count": 0},
        {"path": "ns/other"},
        {"endpoint": "h"},
    ):
        with pytest.raises(KvReferenceUnusable):
            read_reference({**good, **wrong})


@pytest.mark.parametrize(
    ("endpoint", "credentials", "override", "protocol"),
    [("http://s", None, None, Protocol.HTTP), ("https://s", None, "s3", Protocol.S3),
     ("http://s", StoreCredentials(), None, Protocol.S3),
     ("http://s", StoreCredentials(), "http", Protocol.HTTP),
     ("file:///mnt/kv", None, None, Protocol.FILE)],
)  # fmt: skip
def test_the_protocol_follows_from_the_settings(
    endpoint: str, credentials: StoreCredentials | None, override: str | None, protocol: Protocol
) -> None:
    location = store_location(endpoint, protocol=override, credentials=credentials)
    assert location.protocol is protocol
    assert (location.bucket, location.prefix) == ("inference", "kv-cache")


@pytest.mark.parametrize(
    ("endpoint", "namespace", "protocol"),
    [("ftp://s", "a", None), ("http://", "a", None), ("http://s:0", "a", None),
     ("http://user:hush@s", "a", None), ("http://s/?key=hush", "a", None),
     ("user:hush@s", "a", None), ("//user:hush@s", "a", None), ("http:/u:hush@s", "a", None),
     ("http://u:hush@s:port", "a", None), ("file://u:hush@s/x", "a", None),
     ("http://s", "../a", None), ("http://s", "a//b", None), ("http://s", "/a", None),
     ("file://host/x", "a", None), ("file:///x", "a", "s3"), ("http://s", "a", "ftp")],
)  # fmt: skip
def test_wrong_locations_are_refused_without_showing_keys(
    endpoint: str, namespace: str, protocol: str | None
) -> None:
    with pytest.raises(LocationError) as caught:
        store_location(endpoint, namespace, protocol=protocol)
    assert "hush" not in str(caught.value)


def test_secrets_are_shown_by_no_formatting() -> None:
    secret = Secret("hush")
    shown = [repr(secret), str(secret), f"{secret}", f"{secret!r}", f"{secret:>9}"]
    shown += [repr(StoreCredentials(secret, secret)), repr(copy.copy(secret))]
    assert "hush" not in "".join(shown)
    assert secret.reveal() == "hush"
    assert pickle.loads(pickle.dumps(secret)).reveal() == "hush"
