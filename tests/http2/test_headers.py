"""Header blocks, against another's encoder and decoder."""

from __future__ import annotations

import pytest
from hpack import Decoder, Encoder, HPACKError
from hypothesis import given
from hypothesis import strategies as st

from extproc.http2.headers import MAX_HEADERS_BYTES, BadHeaders, HeaderBlocks

NAMES = st.sampled_from([b":path", b":method", b"te", b"content-type", b"traceparent", b"x-long"])
VALUES = st.sampled_from([b"", b"POST", b"trailers", b"/a"]) | st.binary(max_size=80) | st.just(b"v" * 3000)
FIELDS = st.lists(st.tuples(NAMES, VALUES, st.booleans()), max_size=8)  # True: never to be remembered
BLOCKS = st.lists(st.tuples(FIELDS, st.booleans(), st.none() | st.integers(0, 4096)), max_size=6)
PATH = b"/test.Service/Method"
CALL = [(":method", "POST"), (":path", "/envoy.Service/Process"), ("te", "trailers")]


def text(value: bytes) -> str:
    return value.decode("latin-1")


@given(BLOCKS)
def test_what_an_encoder_says_is_read(blocks: list[tuple[list[tuple[bytes, bytes, bool]], bool, int | None]]) -> None:
    encoder, reader = Encoder(), HeaderBlocks()
    for fields, packed, table_bytes in blocks:
        if table_bytes is not None:
            encoder.header_table_size = table_bytes
        block = encoder.encode(fields, huffman=packed)
        assert dict(reader.read(block)) == {text(name): text(value) for name, value, _ in fields}


@given(st.lists(st.binary(max_size=24), max_size=5))
def test_any_bytes_are_taken_as_another_decoder_takes_them(blocks: list[bytes]) -> None:
    decoder, reader = Decoder(max_header_list_size=MAX_HEADERS_BYTES), HeaderBlocks()
    for block in blocks:
        try:
            fields = decoder.decode(block, raw=True)
        except HPACKError:
            with pytest.raises(BadHeaders):
                reader.read(block)
            return
        assert dict(reader.read(block)) == {text(bytes(name)): text(bytes(value)) for name, value in fields}


def test_the_next_call_of_a_peer_is_a_few_references() -> None:
    encoder = Encoder()
    first, second = encoder.encode(CALL), encoder.encode(CALL)
    assert len(second) == len(CALL) < len(first)
    reader = HeaderBlocks()
    assert dict(reader.read(first)) == dict(reader.read(second)) == dict(CALL)


def test_headers_that_say_the_same_are_read_once() -> None:
    path = (0x04, len(PATH), *PATH)  # as Envoy writes it: a literal that no table remembers
    first = bytes((0x83, 0x86, *path, 0x5F, 16)) + b"application/grpc"  # and one that the table does
    later = bytes((0x83, 0x86, *path, 0xBE))
    reader = HeaderBlocks()
    read = [reader.read(block) for block in (first, later, later, first, later, later)]
    assert all(headers == read[0] for headers in read)
    assert [any(headers is other for other in read[:place]) for place, headers in enumerate(read)] == [
        *(False, False, True),
        *(False, False, True),
    ]


def test_a_reference_means_something_else_once_the_table_has_grown() -> None:
    encoder, reader = Encoder(), HeaderBlocks()
    for number in range(40):
        trace = ("traceparent", f"00-{number:032x}-{number:016x}-00")
        assert dict(reader.read(encoder.encode([*CALL, trace]))) == dict([*CALL, trace])
        assert dict(reader.read(encoder.encode(CALL))) == dict(CALL)


@pytest.mark.parametrize(
    "block",
    [
        b"\x80",  # a reference to nothing
        b"\xfe",  # to what is not there
        b"\x82\x20",  # the table resized behind a field
        b"\x3f\xe2\x1f",  # to 4,097 bytes
        b"\x40\x01a\x05b",  # a text that is cut off
        b"\x40\x01a\x81\x00",  # packed, and no symbol's end
        b"\x40\x01a\x84\xff\xff\xff\xff",  # packed: the end of all texts, which must not be there
        b"\xff\xff\xff\xff\xff\xff\x01",  # a number that is too long
    ],
)
def test_what_cannot_be_read(block: bytes) -> None:
    with pytest.raises(BadHeaders):
        HeaderBlocks().read(block)


def test_a_small_block_may_not_unpack_to_a_large_one() -> None:
    reader = HeaderBlocks()
    reader.read(b"\x40\x01a\x7f\xa1\x1e" + b"b" * 4000)  # remembered
    with pytest.raises(BadHeaders, match="too many"):
        reader.read(b"\xbe" * (MAX_HEADERS_BYTES // 4000 + 1))
