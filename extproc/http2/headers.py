"""Headers of calls and of answers: HPACK (RFC 7541)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from hpack import Decoder, HPACKError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_HEADERS_BYTES: Final = 64 * 1024
"""Of one call, unpacked. Envoy's own limit for a request is 60 KiB, and a call has a dozen short ones."""
MAX_KNOWN_BLOCKS: Final = 64

# Literal fields that no table remembers (6.2.2), names from the static table where it has them: the same bytes whatever
# has gone before.
_STATUS_200: Final = b"\x88"
_CONTENT_TYPE: Final = b"\x0f\x10\x10application/grpc"
ANSWER: Final = _STATUS_200 + _CONTENT_TYPE
"""What every answer begins with."""
UNSUPPORTED: Final = b"\x08\x03415"
"""Who speaks no gRPC gets HTTP's own "unsupported media type"."""
WELL_DONE: Final = b"\x00\x0bgrpc-status\x010"


class BadHeaders(ValueError):
    """A block of headers that cannot be read; the connection is lost with it."""


class HeaderBlocks:
    """Reads the header blocks of one connection, in their order.

    A peer says the same of each call, and the same block means the same as long as the connection's table stays what it
    is: such a block is read once.
    """

    def __init__(self) -> None:
        self._decoder = Decoder(max_header_list_size=MAX_HEADERS_BYTES)
        self._known: dict[bytes, Mapping[str, str]] = {}

    def read(self, block: bytes) -> Mapping[str, str]:
        """Of a repeated header the last. Raises BadHeaders."""
        known = self._known.get(block)
        if known is not None:
            return known
        entries: Any = self._decoder.header_table.dynamic_entries  # as objects: what counts is which, not what is in it
        newest, size = (entries[0] if entries else None), len(entries)
        try:
            fields = self._decoder.decode(block, raw=True)
        except HPACKError as error:
            raise BadHeaders(str(error)) from error
        headers = {
            bytes(field[0]).decode("utf-8", "replace"): bytes(field[1]).decode("utf-8", "replace") for field in fields
        }
        # Whatever is added to the table stands first in it, and what is dropped from it makes it shorter.
        unchanged = len(entries) == size and (not entries or entries[0] is newest)
        if not unchanged or len(self._known) >= MAX_KNOWN_BLOCKS:
            self._known.clear()
        if unchanged:
            self._known[block] = headers
        return headers


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
