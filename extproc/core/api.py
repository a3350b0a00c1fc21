"""Api: which dialect a request speaks."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Api(StrEnum):
    """The request's dialect, told by its path and the shape of its body."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    EMBEDDINGS = "embeddings"
    MESSAGES = "messages"
    OTHER = "other"


# Endings, not whole paths: a fleet may serve its APIs under a route prefix. The longer ending stands first.
_ENDINGS = (
    ("/chat/completions", Api.CHAT),
    ("/completions", Api.COMPLETIONS),
    ("/responses", Api.RESPONSES),
    ("/embeddings", Api.EMBEDDINGS),
    ("/messages", Api.MESSAGES),
)

# vLLM's /invocations (Amazon SageMaker's one path for everything) tells the API by the body's fields.
_SHAPE_TOLD_ENDING = "/invocations"
_SHAPES = (("messages", Api.CHAT), ("prompt", Api.COMPLETIONS), ("input", Api.EMBEDDINGS))


def api_of(method: str, path: str, fields: Mapping[str, object]) -> Api:
    """The API that a request calls. Only a POST carries a prompt; all else is OTHER."""
    if method.upper() != "POST":
        return Api.OTHER
    route = path.partition("?")[0].rstrip("/")
    for ending, api in _ENDINGS:
        if route.endswith(ending):
            return api
    if route.endswith(_SHAPE_TOLD_ENDING):
        for field, api in _SHAPES:
            if field in fields:
                return api
    return Api.OTHER
