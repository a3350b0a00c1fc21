"""The dialect is told by the path's end, or by the body where all share one path."""

from __future__ import annotations

import pytest

from extproc.core.api import Api, api_of


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/chat/completions", Api.CHAT),
        ("/v1/completions", Api.COMPLETIONS),
        ("/v1/responses", Api.RESPONSES),
        ("/v1/embeddings", Api.EMBEDDINGS),
        ("/v1/messages", Api.MESSAGES),
        ("/v1/chat/completions/", Api.CHAT),
        ("/v1/chat/completions?timeout=5", Api.CHAT),
        ("/openai/deployments/m1/chat/completions?api-version=2024-10-21", Api.CHAT),
        ("/team-a/llm/v1/messages?beta=true", Api.MESSAGES),
        ("/v1/models", Api.OTHER),
        ("/v1/messages/count_tokens", Api.OTHER),
        ("/v1/responses/resp_1", Api.OTHER),
        ("/v1/audio/transcriptions", Api.OTHER),
        ("/search?next=/v1/completions", Api.OTHER),
        ("/", Api.OTHER),
        ("", Api.OTHER),
    ],
)
def test_path(path: str, api: Api) -> None:
    assert api_of("POST", path, {}) is api
    assert api_of("GET", path, {}) is Api.OTHER, "only a POST carries a prompt"


@pytest.mark.parametrize(
    ("field", "api"),
    [("messages", Api.CHAT), ("prompt", Api.COMPLETIONS), ("input", Api.EMBEDDINGS), ("model", Api.OTHER)],
)
def test_one_path_for_all_is_told_by_the_body(field: str, api: Api) -> None:
    assert api_of("POST", "/invocations", {field: "x"}) is api
