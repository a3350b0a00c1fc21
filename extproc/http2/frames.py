"""The words of HTTP/2 (RFC 9113): kinds of frames, flags, settings, errors."""

from __future__ import annotations

from struct import Struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES: Final = 9

# Kinds (6).
DATA: Final = 0x0
HEADERS: Final = 0x1
RST_STREAM: Final = 0x3
SETTINGS: Final = 0x4
PUSH_PROMISE: Final = 0x5
PING: Final = 0x6
GOAWAY: Final = 0x7
WINDOW_UPDATE: Final = 0x8
CONTINUATION: Final = 0x9

# Flags.
ACK: Final = 0x1
END_STREAM: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITIZED: Final = 0x20

# Settings (6.5.2), with what holds until somebody says otherwise.
ENABLE_PUSH: Final = 0x2
MAX_CONCURRENT_STREAMS: Final = 0x3
INITIAL_WINDOW_SIZE: Final = 0x4
MAX_FRAME_SIZE: Final = 0x5
DEFAULT_WINDOW_BYTES: Final = 65_535
DEFAULT_FRAME_BYTES: Final = 16_384
LARGEST_FRAME_BYTES: Final = 2**24 - 1
LARGEST_WINDOW_BYTES: Final = 2**31 - 1
LOW_31_BITS: Final = 2**31 - 1
"""Of a stream's id or a window's growth; the bit above them means nothing (4.1)."""

# Errors (7).
NO_ERROR: Final = 0x0
PROTOCOL_ERROR: Final = 0x1
FLOW_CONTROL_ERROR: Final = 0x3
STREAM_CLOSED: Final = 0x5
FRAME_SIZE_ERROR: Final = 0x6
REFUSED_STREAM: Final = 0x7
COMPRESSION_ERROR: Final = 0x9
ENHANCE_YOUR_CALM: Final = 0xB

_HEAD: Final = Struct(">HBBBL")
_WORD: Final = Struct(">L")
_SETTING: Final = Struct(">HL")


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """stream_id 0: the connection itself."""
    size = len(payload)
    return _HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


def settings(values: dict[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join([_SETTING.pack(name, value) for name, value in values.items()]))


def window_update(stream_id: int, more_bytes: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, _WORD.pack(more_bytes))


def reset(stream_id: int, error: int) -> bytes:
    return frame(RST_STREAM, 0, stream_id, _WORD.pack(error))


def goaway(last_stream_id: int, error: int) -> bytes:
    return frame(GOAWAY, 0, 0, _WORD.pack(last_stream_id) + _WORD.pack(error))
