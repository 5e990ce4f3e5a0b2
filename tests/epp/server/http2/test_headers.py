"""HPACK both ways, the rules for fields, and the cache of blocks."""

import pytest
from hpack import Decoder
from hpack.exceptions import HPACKError
from hypothesis import given
from hypothesis import strategies as st

from tandem_epp.server.http2.errors import ConnectionFault, ErrorCode, MalformedFields
from tandem_epp.server.http2.headers import EMPTY_TABLE, BlockCache, HeaderDecoder, encode, split
from tandem_epp.server.http2.limits import Limits

from .client import BLOCK, Peer, block, headers, hpack_encoder

pytestmark = pytest.mark.long

GOOD = {":method": "POST", ":scheme": "http", ":path": "/"}


def decoder(cache: BlockCache | None = None) -> HeaderDecoder:
    return HeaderDecoder(BlockCache() if cache is None else cache, 64 * 1024)


def test_a_request_is_read() -> None:
    head = decoder().request(block({**GOOD, ":authority": "a", "x": "é", "content-length": "7"}))
    assert (head.method, head.path, head.length) == ("POST", "/", 7)
    assert head.fields == {"x": "é", "content-length": "7"}


@pytest.mark.parametrize(
    "fields",
    [
        {":scheme": "http", ":path": "/"},
        {":method": "POST", ":path": "/"},
        {":method": "POST", ":scheme": "http"},
        {**GOOD, ":path": ""},
        {**GOOD, ":status": "200"},
        {**GOOD, ":protocol": "websocket"},
        {"a": "b", **GOOD},
        {**GOOD, "Upper": "x"},
        {**GOOD, "sp ace": "x"},
        {**GOOD, "": "x"},
        {**GOOD, "a:b": "x"},
        {**GOOD, "x": "a\r\nb"},
        {**GOOD, "x": "a\0b"},
        {**GOOD, "x": " a"},
        {**GOOD, "x": "a\t"},
        {**GOOD, "connection": "close"},
        {**GOOD, "transfer-encoding": "chunked"},
        {**GOOD, "upgrade": "h2c"},
        {**GOOD, "keep-alive": "1"},
        {**GOOD, "proxy-connection": "close"},
        {**GOOD, "te": "gzip"},
        {**GOOD, "content-length": "-1"},
        {**GOOD, "content-length": "1x"},
        {":method": "CONNECT", ":scheme": "http", ":path": "/", ":authority": "a"},
        {":method": "CONNECT"},
    ],
)
def test_8_2_and_8_3_malformed_fields(fields: dict[str, str]) -> None:
    with pytest.raises(MalformedFields):
        decoder().request(block(fields))
    reset = Peer().start().reset(headers(1, block(fields)))
    assert reset == (1, ErrorCode.PROTOCOL_ERROR)


def test_8_3_a_repeated_pseudo_header_field_is_malformed() -> None:
    for name in (":method", ":path", ":scheme"):
        with pytest.raises(MalformedFields):
            decoder().request(block({name: GOOD[name]}) + block(GOOD))


def test_5_3_of_rfc_9110_repeated_fields_are_joined() -> None:
    assert decoder().request(block(GOOD) + block({"x": "a"}) + block({"x": "b"})).fields == {
        "x": "a,b"
    }


def test_equal_blocks_are_decoded_once_when_the_client_uses_no_table() -> None:
    cache = BlockCache()
    first, second = decoder(cache), decoder(cache)
    head = first.request(EMPTY_TABLE + BLOCK)
    assert first.request(BLOCK) is first.request(BLOCK)
    assert first.request(BLOCK) == head
    # Of another connection, once it uses no table either.
    assert second.request(EMPTY_TABLE + BLOCK) == head
    assert second.request(BLOCK) is first.request(BLOCK)


@pytest.mark.interpreted
def test_a_field_that_never_recurs_leaves_the_others_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with `traceparent`, where a gateway traces."""
    used, encoder = decoder(), hpack_encoder(0)
    used.request(encoder.encode([*GOOD.items(), ("traceparent", "0")]))
    decoded = []
    decode = used._decode
    monkeypatch.setattr(used, "_decode", lambda part: decoded.append(part) or decode(part))
    for n in range(1, 4):
        head = used.request(encoder.encode([*GOOD.items(), ("traceparent", str(n))]))
        assert head.fields == {"traceparent": str(n)}
        assert head.path == "/"
    # The first time all of them, because the block before changed the table's size.
    assert len(decoded) == len(GOOD) + 1 + 2


FIELDS = st.lists(
    st.tuples(
        st.sampled_from([":method", ":path", "te", "content-type", "x-a", "x-" + "b" * 140]),
        st.sampled_from(["POST", "/", "trailers", "", "v" * 130, "w" * 20_000]),
    ),
    max_size=8,
)


@given(FIELDS, st.booleans(), st.integers(0, 300), st.integers(0, 255))
def test_a_block_is_split_where_hpack_splits_it(
    fields: list[tuple[str, str]], huffman: bool, at: int, byte: int
) -> None:
    encoder = hpack_encoder(0)
    encoder.encode([])
    wire = bytearray(encoder.encode(fields, huffman=huffman))
    parts = split(bytes(wire))
    assert parts is not None
    assert b"".join(parts) == wire
    each = [tuple(field) for part in parts for field in Decoder(1 << 20).decode(part)]
    assert each == fields
    # Changed anywhere: it is split alike, or not at all.
    if at < len(wire):
        wire[at] = byte
        parts = split(bytes(wire))
        if parts is not None:
            alone, whole = fresh(), fresh()
            try:
                expected = [tuple(field) for field in whole.decode(bytes(wire), raw=True)]
            except HPACKError:
                with pytest.raises(HPACKError):
                    [field for part in parts for field in alone.decode(part, raw=True)]
            else:
                found = [tuple(f) for part in parts for f in alone.decode(part, raw=True)]
                assert found == expected


def fresh() -> Decoder:
    """A decoder whose client uses no table."""
    made = Decoder(1 << 20)
    made.decode(EMPTY_TABLE)
    return made


def test_literals_that_name_a_field_by_a_large_index_are_split() -> None:
    """RFC 7541, 6.2.2 and 6.2.3: content-type, index 31, takes an octet more."""
    fields = [b"\x0f\x10\x01a", b"\x1f\x10\x01b"]
    assert split(b"".join(fields)) == fields


def test_10_5_1_a_list_of_cached_fields_is_bounded() -> None:
    used = HeaderDecoder(BlockCache(), 1000)
    used.request(EMPTY_TABLE + BLOCK)
    with pytest.raises(ConnectionFault, match="too large"):
        used.request(block(GOOD) + block({"x": "y" * 100}) * 10)


def test_blocks_that_may_depend_on_a_table_are_not_looked_up() -> None:
    """The same bytes mean another field, because the table has changed between them."""
    cache = BlockCache()
    stateless = decoder(cache)
    stateless.request(EMPTY_TABLE + BLOCK)
    tabled, encoder = decoder(cache), hpack_encoder()
    seen = []
    for value in ("one", "two"):
        fields = [*GOOD.items(), ("x-id", value)]
        tabled.request(encoder.encode(fields))
        indexed = encoder.encode(fields)
        seen.append((indexed, tabled.request(indexed).fields["x-id"]))
    assert seen[0][0] == seen[1][0], "the test needs equal blocks"
    assert [value for _, value in seen] == ["one", "two"]
    assert len(cache) == 0


def test_a_table_that_was_given_up_stays_given_up() -> None:
    used = decoder()
    used.request(EMPTY_TABLE + BLOCK)
    with pytest.raises(Exception, match="COMPRESSION_ERROR"):
        used.request(b"\x3f\x61" + BLOCK)


def test_the_cache_is_bounded() -> None:
    cache = BlockCache(entries=4, largest=200)
    used = decoder(cache)
    used.request(EMPTY_TABLE + BLOCK)
    for n in range(100):
        used.request(block({**GOOD, "x": str(n)}))
        assert len(cache) <= 4 + 8 * 4
    before = len(cache)
    used.request(block({**GOOD, "x": "y" * 200}))
    assert len(cache) == before


@pytest.mark.parametrize(
    "wrong",
    [b"\x80", b"\xff\xff\xff\xff\xff\xff\xff\x0f", b"\x00\x05ab", b"\xc8", BLOCK + b"\x20"],
    ids=["index 0", "endless integer", "cut string", "no such index", "late size update"],
)
def test_rfc_7541_an_undecodable_block_ends_the_connection(wrong: bytes) -> None:
    assert Peer().start().goaway(headers(1, wrong)) is ErrorCode.COMPRESSION_ERROR


def test_6_5_2_a_list_that_decodes_to_too_much_ends_the_connection() -> None:
    """A bomb: a large field in the table, then one byte for each use of it."""
    bomb = b"\x40\x01a\x7f\xa1\x1e" + b"x" * 4000 + b"\xbe" * 5000
    code = Peer().start().goaway(headers(1, bomb))
    assert code is ErrorCode.COMPRESSION_ERROR


def test_10_5_1_a_block_is_bounded_however_it_is_framed() -> None:
    peer = Peer(Limits(header_block=100)).start()
    assert peer.goaway(headers(1, bytes(101))) is ErrorCode.ENHANCE_YOUR_CALM


@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=300), st.binary(max_size=40_000)), max_size=5)
)
def test_what_is_encoded_is_decoded(fields: list[tuple[bytes, bytes]]) -> None:
    decoded = Decoder(max_header_list_size=1 << 20).decode(encode(fields), raw=True)
    assert [tuple(field) for field in decoded] == fields
