"""The dialects of LLM requests."""

from __future__ import annotations

from enum import StrEnum


class Api(StrEnum):
    """The request's dialect, told by its path."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    EMBEDDINGS = "embeddings"
    MESSAGES = "messages"
    OTHER = "other"


_BY_ENDING = (
    # The longer ending first.
    ("/chat/completions", Api.CHAT),
    ("/completions", Api.COMPLETIONS),
    ("/responses", Api.RESPONSES),
    ("/embeddings", Api.EMBEDDINGS),
    ("/pooling", Api.EMBEDDINGS),
    ("/messages", Api.MESSAGES),
)


def api_of(path: str) -> Api:
    """By the path's end, so that a gateway's own prefix does not matter."""
    bare = path.partition("?")[0].rstrip("/")
    return next((api for ending, api in _BY_ENDING if bare.endswith(ending)), Api.OTHER)
