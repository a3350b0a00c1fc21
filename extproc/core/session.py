"""The session: the client's own name for a conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SESSION_HEADERS: Final = (
    "x-session-id",  # Ray Serve's RAY_SERVE_SESSION_ID_HEADER_KEY by default; OpenRouter; OpenCode
    "x-smg-routing-key",  # SGLang's and SMG's `manual` and `consistent_hashing` policies
    "x-dynamo-session-id",  # NVIDIA Dynamo, docs "Session IDs"
    "x-session-affinity",  # OpenCode and Pi, for providers that keep sessions together
    "x-claude-code-session-id",  # Claude Code, docs "Gateway protocol reference"
    "x-litellm-session-id",  # LiteLLM, docs "Session Logs"
    "x-openwebui-chat-id",  # Open WebUI with ENABLE_FORWARD_USER_INFO_HEADERS
    "x-opencode-session",  # OpenCode Zen and its clients
    "thread-id",  # Codex: each of a session's agents has a thread, and a context, of its own
    "session-id",  # Codex; older releases spell it session_id
    "x-conversation-id",  # LibreChat's examples for {{LIBRECHAT_BODY_CONVERSATIONID}}
    "conversation-id",  # older Codex releases, as conversation_id
)
"""What clients and routers are seen to use, those made for routing first.

llm-d's x-session-token is not among them: it names a pod, so that all its conversations would be one.
"""
SESSION_FIELDS: Final = (
    "session_id",  # OpenRouter, docs "Prompt Caching"
    "litellm_session_id",  # LiteLLM, docs "Session Logs"
    "prompt_cache_key",  # OpenAI: requests with one key share a prefix and should land together
    "conversation",  # OpenAI responses: an id or {"id": ...}
    "conversation_id",
    "routing_key",  # SGLang's /generate, and what its gateway puts into requests
    "metadata.session_id",  # LiteLLM, docs "Agent iteration budgets"
    "previous_response_id",
)
"""`user` and Anthropic's `metadata.user_id` are not among them: one user may hold many conversations.
`previous_response_id` names a turn rather than a conversation; it comes last, and helps only a client that branches
from one response again and again.
"""


def canonical_header(name: str) -> str:
    """One spelling for `X_Session_ID` and `x-session-id`: proxies rewrite the one to the other."""
    return name.strip().lower().replace("_", "-")


def canonical_headers(headers: Mapping[str, str]) -> Mapping[str, str]:
    """The same headers by their canonical names. headers: names in lower case."""
    if any("_" in name for name in headers):
        return {canonical_header(name): text for name, text in headers.items()}
    return headers


def find_session(
    headers: Mapping[str, str],
    body: Mapping[str, Any] | None,
    session_headers: Sequence[str],
    session_fields: Sequence[str],
    open_key: str | None = None,
) -> tuple[str, str] | None:
    """(id, source) of the first source that has a value, None if none has.

    headers, session_headers: by canonical names. session_fields: dotted paths into the body.
    open_key: the body's field that is unfinished because the body is cut off; it is not looked at.
    source: "header:<name>" or "body:<path>".
    """
    value: str | None
    for name in session_headers:
        if (text := headers.get(name)) is not None and (value := text.strip()):
            return value, f"header:{name}"
    if body:
        for path in session_fields:
            if (path in body or "." in path) and (value := _field(body, path, open_key)) is not None:
                return value, f"body:{path}"
    return None


def _field(body: Mapping[str, Any], path: str, open_key: str | None) -> str | None:
    if open_key is not None and open_key in (path, path.partition(".")[0]):
        return None
    value: Any = body.get(path)
    if value is None and "." in path:
        value = body
        for step in path.split("."):
            value = value.get(step) if isinstance(value, dict) else None
    if isinstance(value, dict):
        value = value.get("id")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value).strip() or None
    return None
