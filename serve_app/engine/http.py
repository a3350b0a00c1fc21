"""The OpenAI face of the simulated engine: what vLLM's API server answers, as far as a router can see it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serve_app.engine.cache import BLOCK_TOKENS
from serve_app.engine.core import Engine, EngineSettings, Step
from serve_app.engine.metrics import EngineMetrics
from serve_app.engine.prompt import PromptError, chat_tokens, completion_tokens, token_count
from serve_app.first_token import first_token_headers
from serve_app.replica_id import ReplicaIdMiddleware

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_CONTENT_TYPE_METRICS = "text/plain; version=0.0.4; charset=utf-8"


def build_app(settings: EngineSettings, replica_id: str) -> ASGIApp:
    """One replica as an ASGI app; the engine inside is its own."""
    metrics = EngineMetrics(settings.model, BLOCK_TOKENS, settings.kv_cache_tokens // BLOCK_TOKENS)
    engine = Engine(settings, metrics)
    started_s = int(time.time())

    async def models(_: Request) -> Response:
        card = {
            "id": settings.model,
            "object": "model",
            "created": started_s,
            "owned_by": "vllm",
            "root": settings.model,
            "parent": None,
            "max_model_len": settings.max_request_tokens,
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def health(_: Request) -> Response:
        return Response()

    async def server_info(_: Request) -> Response:
        return JSONResponse({"model_id": settings.model, "max_model_len": settings.max_request_tokens})

    async def render_metrics(_: Request) -> Response:
        return Response(metrics.render(), media_type=_CONTENT_TYPE_METRICS)

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", GenerationEndpoint(engine, CHAT), methods=["POST"]),
            Route("/v1/completions", GenerationEndpoint(engine, TEXT), methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/server_info", server_info),
            Route("/metrics", render_metrics),
        ],
        exception_handlers={HTTPException: _openai_error},
    )
    return ReplicaIdMiddleware(app, replica_id)


@dataclass(frozen=True, slots=True)
class Shape:
    """How one of the two endpoints reads its prompt and writes its answer."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    prompts: Callable[[dict[str, Any]], list[bytes]]
    whole: Callable[[str], dict[str, Any]]
    chunk: Callable[[str, bool], dict[str, Any]]  # text, is it the first chunk


CHAT = Shape(
    id_prefix="chatcmpl-",
    whole_object="chat.completion",
    chunk_object="chat.completion.chunk",
    prompts=lambda body: [chat_tokens(body)],
    whole=lambda text: {"message": {"role": "assistant", "content": text}},
    chunk=lambda text, first: {"delta": {"role": "assistant", "content": text} if first else {"content": text}},
)
TEXT = Shape(
    id_prefix="cmpl-",
    whole_object="text_completion",
    chunk_object="text_completion",
    prompts=completion_tokens,
    whole=lambda text: {"text": text},
    chunk=lambda text, first: {"text": text},
)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A validated request. include_usage: the stream ends with a chunk that holds the usage."""

    prompts: list[bytes]
    max_tokens: int | None
    salt: str
    stream: bool
    include_usage: bool


class GenerationEndpoint:
    """ASGI app of one endpoint. Response headers leave with the first token, or with the whole answer."""

    def __init__(self, engine: Engine, shape: Shape) -> None:
        self._engine = engine
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = self._read(await Request(scope, receive).body())
        answer = self._stream(request, send) if request.stream else self._whole(request, scope, receive, send)
        await _abort_on_disconnect(receive, answer)

    def _read(self, raw: bytes) -> GenerationRequest:
        settings = self._engine.settings
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise HTTPException(400, "the body must be a JSON object")
        model = body.get("model")
        if model is not None and model != settings.model:
            raise HTTPException(404, f"The model `{model}` does not exist.")
        if body.get("n") not in (None, 1):
            raise HTTPException(400, "the simulated engine gives one answer: 'n' must be 1")
        max_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
        if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
            raise HTTPException(400, "'max_tokens' must be a positive integer")
        try:
            prompts = self._shape.prompts(body)
        except PromptError as error:
            raise HTTPException(400, str(error)) from None
        longest = max(map(token_count, prompts)) + (max_tokens or settings.answer_tokens)
        if longest > settings.max_request_tokens:
            raise HTTPException(
                400, f"prompt + answer are {longest} tokens, the limit is {settings.max_request_tokens}"
            )
        options = body.get("stream_options")
        return GenerationRequest(
            prompts,
            max_tokens,
            salt=str(body.get("cache_salt") or ""),
            stream=bool(body.get("stream")),
            include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        )

    async def _whole(self, request: GenerationRequest, scope: Scope, receive: Receive, send: Send) -> None:
        async def one(prompt: bytes) -> list[Step]:
            at_once = self._engine.settings.max_request_tokens
            steps = self._engine.generate(prompt, request.max_tokens, salt=request.salt, step_tokens=at_once)
            return [step async for step in steps]

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(prompt)) for prompt in request.prompts]
        answers = [task.result() for task in tasks]
        last = [steps[-1] for steps in answers]
        choices = [
            self._choice(index, self._shape.whole("".join(step.text for step in steps)), steps[-1])
            for index, steps in enumerate(answers)
        ]
        payload = {**self._envelope(self._shape.whole_object), "choices": choices, "usage": _usage(last)}
        await JSONResponse(payload, headers=_prefill_headers(last))(scope, receive, send)

    async def _stream(self, request: GenerationRequest, send: Send) -> None:
        envelope = self._envelope(self._shape.chunk_object)
        last: dict[int, Step] = {}
        one_by_one = asyncio.Lock()  # several prompts of one request write to the same stream

        async def one(index: int, prompt: bytes) -> None:
            interval = self._engine.settings.stream_interval_tokens
            steps = self._engine.generate(prompt, request.max_tokens, salt=request.salt, step_tokens=interval)
            async with contextlib.aclosing(steps):
                async for step in steps:
                    async with one_by_one:
                        if not last:
                            await send(_stream_start(step if len(request.prompts) == 1 else None))
                        chunk = self._shape.chunk(step.text, index not in last)
                        last[index] = step
                        await send(_event({**envelope, "choices": [self._choice(index, chunk, step)]}))

        async with asyncio.TaskGroup() as group:
            for index, prompt in enumerate(request.prompts):
                group.create_task(one(index, prompt))
        if request.include_usage:
            await send(_event({**envelope, "choices": [], "usage": _usage(list(last.values()))}))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._shape.id_prefix + uuid.uuid4().hex,
            "object": kind,
            "created": int(time.time()),
            "model": self._engine.settings.model,
        }

    def _choice(self, index: int, content: dict[str, Any], step: Step) -> dict[str, Any]:
        return {"index": index, **content, "logprobs": None, "finish_reason": step.finish_reason}


def _usage(last: list[Step]) -> dict[str, Any]:
    prompt_tokens = sum(step.prefill.prompt_tokens for step in last)
    output_tokens = sum(step.output_tokens for step in last)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(step.prefill.cached_tokens for step in last)},
    }


def _prefill_headers(steps: list[Step]) -> dict[str, str]:
    return first_token_headers(
        prompt_tokens=sum(step.prefill.prompt_tokens for step in steps),
        cached_tokens=sum(step.prefill.cached_tokens for step in steps),
        queue_depth=steps[0].prefill.queue_depth,
    )


def _stream_start(step: Step | None) -> Message:
    headers = {"content-type": "text/event-stream; charset=utf-8"}
    if step:
        headers |= _prefill_headers([step])
    return {
        "type": "http.response.start",
        "status": 200,
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }


def _event(data: dict[str, Any]) -> Message:
    body = b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
    return {"type": "http.response.body", "body": body, "more_body": True}


async def _abort_on_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, or until the client leaves."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work), group.create_task(left())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()


async def _openai_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = {400: "BadRequestError", 404: "NotFoundError"}.get(error.status_code, "APIError")
    details = {"message": error.detail, "type": kind, "param": None, "code": error.status_code}
    return JSONResponse({"error": details}, status_code=error.status_code)
