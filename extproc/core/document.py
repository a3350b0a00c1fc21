"""Document: the JSON object in a request's body, also when only the body's head was seen.

A document whose end was not seen is *open*, and with it the last value of every container on the way down to
the cut: a string may go on, a list may have more items, a number more digits. jiter reads such a document
without saying where the cut was, so whatever stands last is taken as unfinished. That errs on one side
only: at worst a value that was just complete is not used.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jiter

if TYPE_CHECKING:
    from collections.abc import Mapping

# Python's own reader takes about 10 ms for this much; it is asked only about documents that jiter refuses.
_SLOW_READER_LIMIT_BYTES = 1 << 20

# JavaScript spells a text that was cut within an emoji so, and jiter refuses it. Of a head the part before it is read.
# Both alternatives begin alike, since a pattern without a literal beginning takes 20 times as long.
_LONE_SURROGATE = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|[c-fC-F][0-9a-fA-F]{2}(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))"
)

# All routing waits while one document is read, and what takes long is not its length but its number of values: 8 MiB of
# text take some 10 ms, and of `{},` seconds. A prompt of more tokens ids, or strings and containers, than these is read
# by its head alone (brackets and commas within texts count, so 3 MB of source code may be, too). Below the size that is
# not looked at, the worst takes some 50 ms.
_ANY_DENSITY_BYTES = 256 * 1024
_MAX_COMMAS = 1 << 18
_MAX_STRINGS_AND_CONTAINERS = 1 << 16
_FEW = 4096


def last_key(fields: Mapping[str, object]) -> str | None:
    """The key that stands last in the document's own order."""
    return next(reversed(fields.keys()), None)  # type: ignore[call-overload]


@dataclass(slots=True)
class Document:
    """The body's top-level object.

    open: it was cut off, its last value is unfinished and others may follow.
    unread_bytes: of the body, behind what was read.
    """

    fields: dict[str, object]
    open: bool = False
    unread_bytes: int = 0

    @property
    def open_key(self) -> str | None:
        """The field in which the cut lies; None in a document that was seen whole."""
        return last_key(self.fields) if self.open else None

    def settled(self) -> dict[str, object]:
        """The fields whose values are known to be complete."""
        if not self.open:
            return self.fields
        return dict(list(self.fields.items())[:-1])


def read_document(body: bytes, truncated: bool) -> Document | None:
    """Read a JSON object, or the head of one. None: the body is no JSON object.

    A body that ends inside its document is read as a head even if nobody said that it is one: Envoy does not
    always tell (BUFFERED_PARTIAL), and an engine answers 400 to a document that really ends there.
    """
    length_bytes = len(body)
    body = _readable_head(body)
    if not truncated and len(body) == length_bytes:
        try:
            return _document(jiter.from_json(body), open_=False)
        except ValueError as error:
            if not str(error).startswith("EOF"):
                return _read_as_engines_do(body)
    document = _read_head(body)
    if document is None and (lone := _LONE_SURROGATE.search(body)):
        body = body[: lone.start()]
        document = _read_head(body)
    return replace(document, unread_bytes=length_bytes - len(body)) if document is not None else None


def _readable_head(body: bytes) -> bytes:
    """As much of a body as may be read, halved until it is sparse enough."""
    while len(body) > _ANY_DENSITY_BYTES and _is_dense(body):
        body = body[: len(body) // 2]
    return body


def _is_dense(body: bytes) -> bool:
    commas, containers = _count(body, b","), _count(body, b"{") + _count(body, b"[")
    if commas > _MAX_COMMAS:
        return True
    # A comma or a bracket stands before each value and each key, so few of these are few strings.
    if 2 * (commas + containers + 1) + containers <= _MAX_STRINGS_AND_CONTAINERS:
        return False
    return (body.count(b'"') - body.count(b'\\"')) // 2 + containers > _MAX_STRINGS_AND_CONTAINERS


def _count(body: bytes, mark: bytes) -> int:
    """How often a mark occurs. To look for the next of a few is a tenth of the time of counting."""
    found, at = 0, body.find(mark)
    while at >= 0 and found < _FEW:
        found += 1
        at = body.find(mark, at + 1)
    return found + body.count(mark, at) if at >= 0 else found


def _read_head(head: bytes) -> Document | None:
    try:
        # Of two equal keys the later counts, but it keeps the earlier one's place, and then what stands last would
        # not be what was cut.
        root = jiter.from_json(head, partial_mode="trailing-strings", catch_duplicate_keys=True)
    except ValueError:
        return None
    return _document(root, open_=True)


def _read_as_engines_do(body: bytes) -> Document | None:
    """Read what vLLM's server (Starlette: `json.loads`) accepts and jiter does not: BOM, UTF-16, lone surrogates."""
    if len(body) > _SLOW_READER_LIMIT_BYTES:
        return None
    try:
        return _document(json.loads(body), open_=False)
    except ValueError:
        return None


def _document(root: object, open_: bool) -> Document | None:
    return Document(root, open_) if isinstance(root, dict) else None
