"""Plays a script through a real Envoy and measures what its clients see."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import aiohttp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sim.script import Line

TIMEOUT_S: Final = 600.0
"""Of one request, queueing included; as long as OpenAI's own clients wait."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one request.

    error: None where a whole stream came with status 200, else what came instead; the rest is then zero or NaN.
    ttft_s: from sending to the first piece of text. late_s: how much later than due the request was sent.
    """

    error: str | None
    late_s: float
    ttft_s: float = math.nan
    prompt_tokens: int = 0
    cached_tokens: int = 0


async def perform(
    script: Sequence[Sequence[Line]],
    url: str,
    model: str,
    headers: Mapping[str, str],
    salt: str,
    on_answer: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """Send each conversation's first request when it is due, whatever the fleet does, and each later one a pause
    after the answer before it. headers: go along with every request.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    async def converse(lines: Sequence[Line]) -> list[Answer]:
        answers = []
        before_s = began_s
        for line in lines:
            due_s = before_s + line.turn.at_s
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            answers.append(await _ask(session, url + line.path, line, model, headers, salt, due_s))
            before_s = loop.time()
            on_answer()
        return answers

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), connector=connector) as session:
        return [answer for answers in await asyncio.gather(*map(converse, script)) for answer in answers]


async def _ask(
    session: aiohttp.ClientSession,
    url: str,
    line: Line,
    model: str,
    headers: Mapping[str, str],
    salt: str,
    due_s: float,
) -> Answer:
    loop = asyncio.get_running_loop()
    # Written as late as this, so that a long script does not lie in memory as text.
    body = json.dumps(line.body(model, salt)).encode()
    given = {"content-type": "application/json", **headers, **line.headers(salt)}
    sent_s = loop.time()
    late_s = max(0.0, sent_s - due_s)
    first_s = math.nan
    last = b"{}"
    try:
        async with session.post(url, data=body, headers=given) as response:
            if response.status != 200:
                return Answer(f"{response.status} {(await response.text())[:200]}", late_s)
            async for event in response.content:
                if event.startswith(b"data: {"):
                    last = event.removeprefix(b"data: ")
                    if math.isnan(first_s) and _has_text(json.loads(last)):
                        first_s = loop.time()
    except (aiohttp.ClientError, TimeoutError) as error:
        return Answer(repr(error), late_s)
    usage: dict[str, Any] | None = json.loads(last).get("usage")
    if usage is None or math.isnan(first_s):
        return Answer(f"the stream ended with {last[:200]!r}", late_s)
    cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(None, late_s, first_s - sent_s, usage["prompt_tokens"], cached_tokens)


def _has_text(chunk: dict[str, Any]) -> bool:
    return any(choice.get("text") or choice.get("delta", {}).get("content") for choice in chunk.get("choices", ()))
