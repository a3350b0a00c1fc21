"""Headers of calls and of answers: HPACK (RFC 7541)."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from hpack.huffman_table import HUFFMAN_COMPLETE, HUFFMAN_EMIT_SYMBOL, HUFFMAN_FAIL, HUFFMAN_TABLE
from hpack.table import HeaderTable

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_HEADERS_BYTES: Final = 64 * 1024
"""Of one call, unpacked. Envoy's own limit for a request is 60 KiB, and a call has a dozen short ones."""
MAX_KNOWN_BLOCKS: Final = 64
ENTRY_OVERHEAD_BYTES: Final = 32
"""What a field counts beside its name and value (4.1)."""

# Literal fields that no table remembers (6.2.2), names from the static table where it has them: the same bytes whatever
# has gone before.
_STATUS_200: Final = b"\x88"
_CONTENT_TYPE: Final = b"\x0f\x10\x10application/grpc"
ANSWER: Final = _STATUS_200 + _CONTENT_TYPE
"""What every answer begins with."""
UNSUPPORTED: Final = b"\x08\x03415"
"""Who speaks no gRPC gets HTTP's own "unsupported media type"."""
WELL_DONE: Final = b"\x00\x0bgrpc-status\x010"


_STATIC: Final = [
    (name.decode(), value.decode(), len(name) + len(value) + ENTRY_OVERHEAD_BYTES)
    for name, value in HeaderTable.STATIC_TABLE
]
# Appendix B as a machine that takes four bits at a time: by state and bits, what it does and becomes.
_STATES: Final = bytes([state for state, _, _ in HUFFMAN_TABLE])
_FLAGS: Final = bytes([flags for _, flags, _ in HUFFMAN_TABLE])
_SYMBOLS: Final = bytes([symbol for _, _, symbol in HUFFMAN_TABLE])


class BadHeaders(ValueError):
    """A block of headers that cannot be read; the connection is lost with it."""


class HeaderBlocks:
    """Reads the header blocks of one connection, in their order.

    A peer says the same of each call, and the same block means the same as long as the connection's table stays what it
    is: such a block is read once.

    Not hpack's own Decoder, since a data plane that traces names another span in each call, and to read that with it
    costs as much as a decision. Its tables are used; tests hold the two against each other.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, Mapping[str, str]] = {}
        self._entries: deque[tuple[str, str, int]] = deque()  # the newest first; with their sizes
        self._entries_bytes = 0
        self._limit_bytes = HeaderTable.DEFAULT_SIZE

    def read(self, block: bytes) -> Mapping[str, str]:
        """Of a repeated header the last. Raises BadHeaders."""
        known = self._known.get(block)
        if known is not None:
            return known
        try:
            headers, table_stays = self._read(block)
        except IndexError:
            raise BadHeaders("a block that is cut off, or refers to what is not there") from None
        if not table_stays or len(self._known) >= MAX_KNOWN_BLOCKS:
            self._known.clear()
        if table_stays:
            self._known[block] = headers
        return headers

    def _read(self, block: bytes) -> tuple[dict[str, str], bool]:
        """(headers, whether the table has stayed what it was)."""
        headers: dict[str, str] = {}
        table_stays = True
        at, end, unpacked_bytes = 0, len(block), 0
        while at < end:
            kind = block[at]
            if kind & 0x80:  # all of it is in the table (6.1)
                index, at = _integer(block, at, 7)
                name, value, size = self._entry(index)
            elif kind & 0xE0 == 0x20:  # another size for the table (6.3)
                limit_bytes, at = _integer(block, at, 5)
                if headers or limit_bytes > HeaderTable.DEFAULT_SIZE:
                    raise BadHeaders("a table that may not be resized so")
                self._limit_bytes = limit_bytes
                self._make_room(0)
                table_stays = False
                continue
            else:  # a literal, to be remembered or not (6.2)
                remembered = kind & 0x40 != 0
                index, at = _integer(block, at, 6 if remembered else 4)
                if index:
                    name, _, _ = self._entry(index)
                else:
                    name, at = _string(block, at)
                value, at = _string(block, at)
                size = len(name) + len(value) + ENTRY_OVERHEAD_BYTES
                if remembered:
                    table_stays = False
                    self._make_room(size)
                    if size <= self._limit_bytes:
                        self._entries.appendleft((name, value, size))
                        self._entries_bytes += size
            unpacked_bytes += size
            if unpacked_bytes > MAX_HEADERS_BYTES:
                raise BadHeaders("too many headers")
            headers[name] = value
        return headers, table_stays

    def _entry(self, index: int) -> tuple[str, str, int]:
        """From the static table, then from the connection's (2.3.3)."""
        if not index:
            raise BadHeaders("a reference to nothing")
        if index <= len(_STATIC):
            return _STATIC[index - 1]
        return self._entries[index - len(_STATIC) - 1]

    def _make_room(self, size: int) -> None:
        """Forget the oldest until so much fits, or nothing is left (4.4)."""
        while self._entries and self._entries_bytes + size > self._limit_bytes:
            _, _, forgotten_bytes = self._entries.pop()
            self._entries_bytes -= forgotten_bytes


def _integer(block: bytes, at: int, prefix_bits: int) -> tuple[int, int]:
    """(value, where it ends) (5.1)."""
    most = (1 << prefix_bits) - 1
    value = block[at] & most
    at += 1
    if value < most:
        return value, at
    for shift in (0, 7, 14, 21):
        more = block[at]
        at += 1
        value += (more & 0x7F) << shift
        if more < 0x80:
            return value, at
    raise BadHeaders("a number that is too long")


def _string(block: bytes, at: int) -> tuple[str, int]:
    """(text, where it ends) (5.2). Bytes that are not UTF-8 become one character each, so that sizes are right."""
    packed = block[at] & 0x80
    length, at = _integer(block, at, 7)
    end = at + length
    if end > len(block):
        raise BadHeaders("a block that is cut off")
    text = block[at:end]
    return (_unpacked(text) if packed else text).decode("latin-1"), end


def _unpacked(text: bytes) -> bytes:
    """Undo the Huffman code (appendix B), four bits at a time."""
    states, all_flags, symbols = _STATES, _FLAGS, _SYMBOLS
    unpacked: list[int] = []
    state, flags = 0, HUFFMAN_COMPLETE
    for byte in text:
        at = state << 4 | byte >> 4
        before = all_flags[at]
        if before & HUFFMAN_EMIT_SYMBOL:
            unpacked.append(symbols[at])
        at = states[at] << 4 | byte & 15
        flags = all_flags[at]
        if flags & HUFFMAN_EMIT_SYMBOL:
            unpacked.append(symbols[at])
        if (before | flags) & HUFFMAN_FAIL:
            raise BadHeaders("a text that is not packed as it should be")
        state = states[at]
    if not flags & HUFFMAN_COMPLETE:
        raise BadHeaders("a text whose packing is cut off")
    return bytes(unpacked)


def trailers(status: int, message: str) -> bytes:
    """How a call ended (grpc/doc/statuscodes.md)."""
    if status == 0 and not message:
        return WELL_DONE
    return _field(b"grpc-status", str(status)) + _field(b"grpc-message", quote(message[:1000], safe=" "))


def _field(name: bytes, value: str) -> bytes:
    text = value.encode("ascii")
    return b"\x00" + bytes((len(name),)) + name + _length(len(text)) + text


def _length(size: int) -> bytes:
    """An integer behind a prefix of 7 bits (5.1)."""
    if size < 127:
        return bytes((size,))
    size -= 127
    coded = bytearray((127,))
    while size >= 128:
        coded.append(size & 127 | 128)
        size >>= 7
    coded.append(size)
    return bytes(coded)
