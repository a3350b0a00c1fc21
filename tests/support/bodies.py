"""Request bodies of every dialect, as clients write them."""

from __future__ import annotations

import json
from typing import Any

from extproc.core.request import Request

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "embeddings": "/v1/embeddings",
    "messages": "/v1/messages",
}

MANUAL = (
    'Torque the stem bolts to 5 N·m; never reuse a bent axle. Größe, 車輪, 🚲 and \\ "quotes" stay as they are.\n' * 8
)
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo" + "A" * 64}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"id": {}}}}}
    for name in ("find_frame", "order_spokes")
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "find_frame", "arguments": '{"id": 7}'}}

CHAT: dict[str, Any] = {
    "model": "m1",
    "tools": TOOLS,
    "messages": [
        {"role": "system", "content": MANUAL},
        {"role": "developer", "content": "Answer in metric units."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Which hub? 🚲"}, PICTURE, {"type": "text", "text": "?"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "36 holes"},
        {"role": "assistant", "content": "A 36-hole hub."},
        {"role": "user", "name": "ada", "content": MANUAL},
    ],
    "stream": True,
}
MESSAGES: dict[str, Any] = {
    "model": "m1",
    "tools": [{"name": "find_frame", "input_schema": {"type": "object"}}],
    "system": [
        {"type": "text", "text": MANUAL, "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Go."},
    ],
    "messages": [
        {"role": "user", "content": "Which hub? 🚲"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "find_frame", "input": {"id": 7}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": MANUAL}]},
    ],
    "max_tokens": 100,
}
RESPONSES: dict[str, Any] = {
    "model": "m1",
    "instructions": MANUAL,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Which hub? 🚲"}]},
        {"type": "function_call", "call_id": "c1", "name": "find_frame", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": MANUAL},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A 36-hole hub."}]},
    ],
}

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat", CHAT),
    "chat, model and tools last": ("chat", {name: CHAT[name] for name in ("messages", "stream", "tools", "model")}),
    "chat, content before role": (
        "chat",
        {"model": "m1", "messages": [{"content": turn["content"], "role": turn["role"]} for turn in CHAT["messages"]]},
    ),
    "chat, template input": (
        "chat",
        {"model": "m1", "chat_template_kwargs": {"thinking": False}, "documents": [{"text": "Hubs."}], **CHAT},
    ),
    "messages": ("messages", MESSAGES),
    "messages, system as text": ("messages", {**MESSAGES, "system": MANUAL}),
    "messages, system last": (
        "messages",
        {name: MESSAGES[name] for name in ("model", "tools", "messages", "system", "max_tokens")},
    ),
    "responses": ("responses", RESPONSES),
    "responses, input as text": ("responses", {"model": "m1", "instructions": MANUAL, "input": "Which hub? " + MANUAL}),
    "responses, no instructions": ("responses", {"model": "m1", "input": RESPONSES["input"]}),
    "completions": ("completions", {"model": "m1", "prompt": MANUAL * 2, "max_tokens": 5}),
    "completions, texts": ("completions", {"model": "m1", "prompt": ["one", MANUAL, "🚲"]}),
    "completions, token ids": ("completions", {"model": "m1", "prompt": list(range(128000, 128300))}),
    "completions, lists of token ids": ("completions", {"model": "m1", "prompt": [[1, 22, 333], list(range(300))]}),
    "embeddings": ("embeddings", {"model": "m1", "input": MANUAL}),
    "embeddings, texts": ("embeddings", {"model": "m1", "input": [MANUAL, "🚲"]}),
    "embeddings, dialogue": ("embeddings", {"model": "m1", "messages": CHAT["messages"]}),
}
"""Name -> (dialect, body)."""


def post(dialect: str, body: Any, headers: dict[str, str] | None = None, *, escaped: bool = False) -> Request:
    """A request whose whole body is seen. escaped: everything beyond ASCII as \\uXXXX."""
    return Request("POST", PATHS[dialect], headers or {}, json.dumps(body, ensure_ascii=escaped).encode())


def head_of(request: Request, length_bytes: int) -> Request:
    """The same request, of whose body only the head is seen."""
    return Request(
        request.method,
        request.path,
        request.headers,
        request.body[:length_bytes],
        truncated=True,
        content_length_bytes=len(request.body),
    )
