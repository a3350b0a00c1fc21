"""Features: everything about a request that routing depends on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Api(StrEnum):
    """The request's dialect, told by its path and the shape of its body."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    EMBEDDINGS = "embeddings"
    MESSAGES = "messages"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Rung:
    """A prefix signature: the keyed BLAKE3 of the prompt's first `offset_bytes` bytes (16 bytes of it)."""

    offset_bytes: int
    signature: bytes


@dataclass(frozen=True, slots=True)
class Features:
    """What is known of a request before any replica is looked at.

    conversation_key: 16 bytes; the session where the client names one, else the prompt's opening; None: no affinity.
    conversation_source: "header:<name>", "body:<path>", "prompt", or None.
    rungs: ascending by offset, the doubling ones and the semantic boundaries alike.
    system_rung: the boundary at the end of tools + system, None where there is none.
    prompt_bytes: length of the canonical prompt; of a truncated one an estimate from the content length.
    """

    api: Api
    model: str | None
    conversation_key: bytes | None
    conversation_source: str | None
    rungs: tuple[Rung, ...]
    system_rung: Rung | None
    prompt_bytes: int
    truncated: bool
