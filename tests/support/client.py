"""A chat client that looks at where its answers come from."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    import aiohttp

CHAT = "/v1/chat/completions"
Message = dict[str, str]


@dataclass(frozen=True)
class Answer:
    """trace_id: of the trace that the client began, by which the decision's span is found."""

    status: int
    replica: str
    text: str
    cached_tokens: int
    trace_id: str


@dataclass
class Chat:
    """One dialogue; `say` sends all of it, as chat clients do. headers, fields: go along with each request."""

    session: aiohttp.ClientSession
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)

    async def say(self, text: str, max_tokens: int = 4) -> Answer:
        self.messages.append({"role": "user", "content": text})
        body = {"model": "sim", "messages": self.messages, "max_tokens": max_tokens, **self.fields}
        answer = await ask(self.session, self.url, json.dumps(body).encode(), self.headers)
        if answer.status == 200:
            self.messages.append({"role": "assistant", "content": answer.text})
        return answer


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    body: bytes | AsyncIterator[bytes] | None,
    headers: Mapping[str, str] | None = None,
    method: str = "POST",
    path: str = CHAT,
) -> Answer:
    """One request that is not streamed, in a trace of its own."""
    trace_id = secrets.token_hex(16)
    given = {
        "content-type": "application/json",
        "traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01",
        **(headers or {}),
    }
    async with session.request(method, url + path, data=body, headers=given) as response:
        content = await response.read()
        said = _choice(content) if response.status == 200 and path == CHAT else {}
        return Answer(
            response.status,
            response.headers.get("x-replica-id", ""),
            said.get("text", content.decode(errors="replace")),
            said.get("cached", 0),
            trace_id,
        )


def _choice(content: bytes) -> dict[str, Any]:
    document = json.loads(content)
    details = document["usage"].get("prompt_tokens_details") or {}
    return {"text": document["choices"][0]["message"]["content"], "cached": details.get("cached_tokens") or 0}


def long_text(seed: str, tokens: int) -> str:
    """About so many tokens that no other seed begins with."""
    words: Sequence[str] = [f"{seed}-{number}" for number in range(tokens)]
    return " ".join(words)[: tokens * 4]
