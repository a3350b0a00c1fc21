"""Bodies made to be slow, deep or wide: up to 8 MiB, what Envoy lets through."""

from __future__ import annotations

import gzip
import random
import zlib

SIZE_BYTES = 8 << 20
CHAT_OPENING = b'{"model": "m", "messages": ['


def filled(opening: bytes, piece: bytes, ending: bytes = b"") -> bytes:
    """Pieces between opening and ending, as many as fit."""
    return opening + piece * ((SIZE_BYTES - len(opening) - len(ending)) // len(piece)) + ending


BOMBS: dict[str, bytes] = {
    "a million arrays deep": b'{"messages": ' + b"[" * 1_000_000,
    "a hundred thousand arrays deep, closed": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "objects deep": filled(b"", b'{"a":'),
    "tools as deep as the parser goes": b'{"messages": [{"role": "user", "content": "x"}], "tools": '
    + (b"[" * 190 + b"]" * 190 + b"}"),
    "numbers": filled(b'{"prompt": [', b"1,", b"1]}"),
    "floats": filled(b'{"prompt": [', b"1e9,", b"1]}"),
    "lists of token ids": filled(b'{"prompt": [', b"[1],", b"[1]]}"),
    "empty turns": filled(CHAT_OPENING, b"{},", b"{}]}"),
    "small turns": filled(CHAT_OPENING, b'{"role":"user","content":"a"},', b"{}]}"),
    "small parts": filled(CHAT_OPENING + b'{"role":"user","content":[', b'{"type":"text","text":"a"},', b"{}]}]}"),
    "texts as turns": filled(b'{"input": [', b'"a",', b'"a"]}'),
    "tools": filled(b'{"messages": [], "tools": [', b'{"type":"function"},', b"{}]}"),
    "many keys": b"{" + b",".join(b'"k%d":1' % number for number in range(600_000)) + b"}",
    "one key again and again": filled(b"{", b'"a":1,', b'"a":1}'),
    "escapes": filled(b'{"prompt": "', b"\\u0041", b'"}'),
    "lone surrogates": filled(b'{"prompt": "', b"\\ud800", b'"}'),
    "backslashes": filled(b'{"prompt": "', b"\\"),
    "a number of millions of digits": filled(b'{"model": ', b"9", b"}"),
    "a number of 4,000 digits": b'{"session_id": ' + b"9" * 4000 + b"}",
    "invalid UTF-8": filled(b'{"prompt": "', b"\xff", b'"}'),
    "NUL bytes": bytes(SIZE_BYTES),
    "spaces": b" " * SIZE_BYTES,
    "quotes": b'"' * SIZE_BYTES,
    "a text without end": filled(b'{"prompt": "', b"a"),
    "numbers without end": filled(b'{"prompt": [', b"1,"),
    "noise": random.Random(1).randbytes(SIZE_BYTES),
    "gzip": gzip.compress(bytes(64 << 20)),
    "deflate": zlib.compress(bytes(SIZE_BYTES)),
}
