"""What the decision sees of an HTTP request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class Request:
    """One HTTP request, or as much of it as has been seen.

    headers: names in lower case; of a repeated header the last value.
    body: the bytes seen so far; the whole body unless `truncated`.
    content_length_bytes: size of the whole body as the client declared it, None where it did not.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""
    truncated: bool = False
    content_length_bytes: int | None = None
