"""Keys, objects, references and locations: pure."""

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
from tandem_kvstore.errors import KvRejected, LocationError, Reason
from tandem_kvstore.format.identity import KvIdentity, Prompt, chunk_keys
from tandem_kvstore.format.manifest import DataObject, Manifest, encode_manifest, inline_data
from tandem_kvstore.format.tensors import TensorSpec, header_bytes, tensor_views
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


PROMPT = Prompt(TOKENS, cache_salt="salt", adapter="adapter", media=((3, "image"),))
PARTS: list[tuple[str, str, object]] = [
    ("weights: another commit, or other bytes", "weights", "c0ffef"),
    ("data type of the cache", "dtype", "fp8_e4m3"),
    ("number of layers", "layers", 5),
    ("heads", "kv_heads", 4),
    ("width of a head", "head_dim", 16),
    ("block size", "block_size", 32),
    ("chunk size", "chunk_tokens", 16),
    ("physical layout", "layout", "block,token,kv,head,dim"),
    ("rank of tensor parallelism", "tensor_parallel", (1, 2)),
    ("size of tensor parallelism", "tensor_parallel", (0, 4)),
    ("rank of pipeline parallelism", "pipeline_parallel", (1, 2)),
    ("size of pipeline parallelism", "pipeline_parallel", (0, 4)),
    ("quantization", "quantization", "fp8"),
    ("scales of an fp8 cache", "kv_scales", "other scales"),
    ("settings that replace the model's own", "overrides", '{"rope_theta": 2.0}'),
    ("engine", "engine", "other"),
    ("format version", "format", "tandem-kv/0"),
    ("token", "token_ids", (TOKENS[0] + 1, *TOKENS[1:])),
    ("cache_salt", "cache_salt", "other"),
    ("LoRA adapter", "adapter", "other"),
    ("LoRA adapter against none", "adapter", ""),
    ("image", "media", ((3, "other"),)),
    ("place of an image", "media", ((4, "image"),)),
    ("one more image, or prompt embedding", "media", ((3, "image"), (9, "embedding"))),
    ("no image", "media", ()),
]
"""What KV depends on, the field that has it, and another value."""


@pytest.mark.parametrize(("field", "value"), [p[1:] for p in PARTS], ids=[p[0] for p in PARTS])
def test_each_part_alone_changes_all_keys(field: str, value: object) -> None:
    base = msgspec.structs.replace(
        IDENTITY, tensor_parallel=(0, 2), pipeline_parallel=(0, 2), overrides='{"rope_theta": 1.0}'
    )
    identity, prompt = base, PROMPT
    if field in KvIdentity.__struct_fields__:
        identity = msgspec.structs.replace(base, **{field: value})
    else:
        prompt = msgspec.structs.replace(PROMPT, **{field: value})
    changed = chunk_keys(identity, prompt)
    assert not set(chunk_keys(base, PROMPT)) & set(changed)
    assert len(set(changed)) == len(TOKENS) // identity.chunk_tokens


def test_each_field_is_a_part_of_the_keys() -> None:
    fields = {field for _, field, _ in PARTS}
    assert fields == {*KvIdentity.__struct_fields__, *Prompt.__struct_fields__}


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


SPECS = (TensorSpec("layer.0", "uint8", (2, 3)), TensorSpec("layer.1", "float16", (2,)))
KEY = "a" * 64
BODY = b"abcdef" + b"ghij"


def _data_object(key: str = KEY, identity: str = "ours") -> bytes:
    return header_bytes("00", SPECS, key, identity) + BODY


def test_a_data_object_gives_the_bytes_of_each_tensor() -> None:
    views = tensor_views(_data_object(), "00", SPECS, KEY, "ours")
    assert [bytes(view) for view in views] == [b"abcdef", b"ghij"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(_data_object(identity="other"), Reason.FOREIGN, id="identity"),
        pytest.param(_data_object(key="b" * 64), Reason.SWAPPED, id="prefix"),
        pytest.param(_data_object() + b"k", Reason.FORMAT, id="longer"),
        pytest.param(_data_object()[:-1], Reason.FORMAT, id="shorter"),
        pytest.param(_data_object(identity="x" * (1 << 20)), Reason.FORMAT, id="long-header"),
        pytest.param(b"abc", Reason.FORMAT, id="no-header"),
    ],
)
def test_a_data_object_with_another_header_is_refused(data: bytes, reason: Reason) -> None:
    with pytest.raises(KvRejected) as caught:
        tensor_views(data, "00", SPECS, KEY, "ours")
    assert caught.value.reason is reason


def test_truncated_data_behind_a_manifest_are_refused() -> None:
    manifest = Manifest(
        format=TENSOR_FORMAT,
        identity="ours",
        prefix_hash=KEY,
        previous="",
        token_count=32,
        writer="one",
        data=(DataObject("00", 6, "0"), DataObject("01", 4, "1")),
        is_inline=True,
    )
    stored = encode_manifest(manifest) + BODY
    assert bytes(inline_data(stored, manifest)) == BODY
    with pytest.raises(KvRejected) as caught:
        inline_data(stored[:-1], manifest)
    assert caught.value.reason is Reason.TRUNCATED


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


@pytest.mark.parametrize("host", ["10.0.0.1:9000", "[::1]:9000"])
def test_a_bucket_is_not_put_before_an_address(host: str) -> None:
    with pytest.raises(LocationError, match="needs a host name"):
        store_location(f"http://{host}", protocol="s3", virtual_host_style=True)
    store_location(f"http://{host}", protocol="s3")


def test_secrets_are_shown_by_no_formatting() -> None:
    secret = Secret("hush")
    shown = [repr(secret), str(secret), f"{secret}", f"{secret!r}", f"{secret:>9}"]
    shown += [repr(StoreCredentials(secret, secret)), repr(copy.copy(secret))]
    assert "hush" not in "".join(shown)
    assert secret.reveal() == "hush"
    assert pickle.loads(pickle.dumps(secret)).reveal() == "hush"
