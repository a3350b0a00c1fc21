"""Response headers that mean "first token".

An OpenAI server streams its response headers as soon as it has accepted a request, seconds before the first
token when the engine is busy. A router that counts outstanding prefill work wants to know the latter.
`FirstTokenMiddleware` holds the response start until the first non-empty body chunk, and adds what the engine
tells by then:

    x-prompt-tokens   length of the prompt
    x-cached-tokens   how many of them came from the prefix cache
    x-queue-depth     requests at this replica that still wait for their first token

It changes no byte of the body and holds back nothing after the first chunk. Any vLLM server can use it:

    vllm serve MODEL --middleware serve_app.first_token.FirstTokenMiddleware

The token counts come from the engine client's own `RequestOutput`s (`prompt_token_ids`,
`num_cached_tokens`: public fields of vLLM's EngineClient interface), since a stream's body has them only if
the client asked for usage. Where the app has no such engine client, or several prompts of one request are
not all under way yet, the two headers are left out.
"""

from __future__ import annotations

import contextlib
import functools
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.datastructures import MutableHeaders

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

PROMPT_TOKENS_HEADER = "x-prompt-tokens"
CACHED_TOKENS_HEADER = "x-cached-tokens"
QUEUE_DEPTH_HEADER = "x-queue-depth"


def first_token_headers(prompt_tokens: int, cached_tokens: int, queue_depth: int) -> dict[str, str]:
    return {
        PROMPT_TOKENS_HEADER: str(prompt_tokens),
        CACHED_TOKENS_HEADER: str(cached_tokens),
        QUEUE_DEPTH_HEADER: str(queue_depth),
    }


@dataclass(slots=True, eq=False)
class _Prefills:
    """The prompts that one HTTP request handed to the engine, and the totals of those that are prefilled."""

    handed_over: int = 0
    prefilled: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


_prefills: ContextVar[_Prefills] = ContextVar("prefills")


class FirstTokenMiddleware:
    """Holds the response start of every POST until its first non-empty body chunk."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._without_token: set[_Prefills] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        _observe_engine(scope)
        prefills = _Prefills()
        _prefills.set(prefills)  # the server runs each request in a context of its own
        self._without_token.add(prefills)
        held: Message | None = None

        async def send_on_first_token(message: Message) -> None:
            nonlocal held
            if message["type"] == "http.response.start":
                held = message
                return
            if held is not None:
                if message.get("more_body") and not message.get("body"):
                    return
                self._without_token.discard(prefills)
                self._describe(held, prefills)
                start, held = held, None
                await send(start)
            await send(message)

        try:
            await self._app(scope, receive, send_on_first_token)
        finally:
            self._without_token.discard(prefills)

    def _describe(self, start: Message, prefills: _Prefills) -> None:
        headers = MutableHeaders(scope=start)
        headers[QUEUE_DEPTH_HEADER] = str(len(self._without_token))
        if prefills.handed_over and prefills.handed_over == prefills.prefilled:
            headers[PROMPT_TOKENS_HEADER] = str(prefills.prompt_tokens)
            headers[CACHED_TOKENS_HEADER] = str(prefills.cached_tokens)


def _observe_engine(scope: Scope) -> None:
    """Have the app's engine client report each prompt's first output to the HTTP request it belongs to."""
    client = getattr(scope["app"].state, "engine_client", None) if "app" in scope else None
    if client is not None and not hasattr(client.generate, "__wrapped__"):
        client.generate = _observed(client.generate)


def _observed(generate: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    @functools.wraps(generate)
    def observed(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        outputs = generate(*args, **kwargs)
        prefills = _prefills.get(None)
        if prefills is None:
            return outputs
        prefills.handed_over += 1
        return _counted(outputs, prefills)

    return observed


async def _counted(outputs: AsyncIterator[Any], prefills: _Prefills) -> AsyncIterator[Any]:
    first = True
    async with contextlib.aclosing(outputs):  # type: ignore[type-var]  # vLLM: an async generator
        async for output in outputs:
            if first and output.prompt_token_ids is not None and output.num_cached_tokens is not None:
                prefills.prefilled += 1
                prefills.prompt_tokens += len(output.prompt_token_ids)
                prefills.cached_tokens += output.num_cached_tokens
            first = False
            yield output
