"""One request through the simulated engine: wait for the engine, prefill what isn't cached, decode.

Prefill is a queue of one: the engine computes one prompt at a time, in order of arrival, and looks into the
cache when a prompt's turn comes, as vLLM's scheduler does. Deadlines follow each other on a time line of
their own rather than on when a sleep returned, so a busy event loop doesn't slow the simulated engine down.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serve_app.engine.cache import BLOCK_TOKENS, Blocks, PrefixCache, block_hashes
from serve_app.engine.prompt import TOKEN_BYTES, token_count, words
from serve_app.engine.timing import Timing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from serve_app.engine.metrics import EngineMetrics

KV_CACHE_TOKENS = 331_000
"""What eight 80-GB GPUs hold beside a 405-billion-parameter FP8 model at vLLM's 90% memory use:
(8 * 80 - 64 - 405) GB / (126 layers * 8 KV heads * 128 * K and V * 2 bytes)."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What a replica is told at its start.

    model: the name it answers to.
    kv_cache_tokens: capacity of the prefix cache, rounded down to whole blocks.
    max_model_tokens: longest prompt + answer; 131,072 as for Llama 3.1.
    answer_tokens: length of an answer whose request sets no limit.
    stream_interval_tokens: output tokens per streamed chunk after the first; vLLM's --stream-interval.
    """

    model: str = "sim"
    kv_cache_tokens: int = KV_CACHE_TOKENS
    max_model_tokens: int = 131_072
    answer_tokens: int = 32
    stream_interval_tokens: int = 1
    timing: Timing = field(default_factory=Timing)

    @property
    def max_request_tokens(self) -> int:
        """Prompt + answer of one request can't exceed this: it has to fit into the cache by itself."""
        return min(self.max_model_tokens, self.kv_cache_tokens // BLOCK_TOKENS * BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class Prefill:
    """What is known of a request at its first token.

    queue_depth: requests at this replica that still waited for theirs.
    """

    prompt_tokens: int
    cached_tokens: int
    queue_depth: int


@dataclass(frozen=True, slots=True)
class Step:
    """The output that a request gained since its last step.

    output_tokens: all of them so far. finish_reason: "stop" or "length" in the last step.
    """

    text: str
    output_tokens: int
    finish_reason: str | None
    prefill: Prefill


@dataclass(slots=True, eq=False)
class _Request:
    prompt: bytes
    max_tokens: int
    hashes: list[int]
    arrived_s: float
    blocks: Blocks | None = None
    output: list[str] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return token_count(self.prompt)


class Engine:
    """All of it runs on one event loop."""

    def __init__(self, settings: EngineSettings, metrics: EngineMetrics) -> None:
        self.settings = settings
        self._timing = settings.timing
        self._cache = PrefixCache(settings.kv_cache_tokens // BLOCK_TOKENS)
        self._turn = asyncio.Lock()  # to prefill; wakes its waiters in order of arrival
        self._prefilled_s = 0.0  # when the engine is done with the last prompt it took
        self._freed = asyncio.Event()
        self._waiting: set[_Request] = set()
        self._running: set[_Request] = set()
        self._without_token: set[_Request] = set()
        self._metrics = metrics
        metrics.follow(
            running=lambda: len(self._running),
            waiting=lambda: len(self._waiting),
            kv_usage=lambda: self._cache.held_blocks / self._cache.capacity_blocks,
        )

    async def generate(
        self, prompt: bytes, max_tokens: int | None = None, *, salt: str = "", step_tokens: int = 1
    ) -> AsyncGenerator[Step]:
        """Yield the answer at the pace of the timing model; closing or cancelling it aborts the request.

        prompt: tokens as of `prompt.py`. max_tokens: length of the answer, None: the engine's own.
        salt: requests share cached blocks only within one salt.
        step_tokens: how many tokens make a step; the first token is always a step of its own.
        """
        parent = hash(salt)
        answer_tokens = max_tokens or self.settings.answer_tokens
        finish_reason = "length" if max_tokens else "stop"
        request = _Request(prompt, answer_tokens, block_hashes(prompt, parent), _now_s())
        self._waiting.add(request)
        self._without_token.add(request)
        ended = "abort"
        try:
            blocks, first_token_s = await self._prefill(request)
            await _sleep_until(first_token_s)
            self._without_token.discard(request)
            prefill = Prefill(request.prompt_tokens, blocks.found * BLOCK_TOKENS, queue_depth=len(self._without_token))
            self._metrics.first_token(prefill.prompt_tokens, prefill.cached_tokens, _now_s() - request.arrived_s)
            text = words(prompt, answer_tokens)
            while (done := len(request.output)) < answer_tokens:
                step = list(itertools.islice(text, step_tokens if done else 1))
                done += len(step)
                await _sleep_until(first_token_s + (done - 1) * self._timing.decode_s_per_token)
                request.output += step
                reason = None if done < answer_tokens else finish_reason
                ended = reason or ended
                yield Step("".join(step), done, reason, prefill)
        finally:
            self._metrics.ended(ended, len(request.output), _now_s() - request.arrived_s)
            self._forget(request, parent)

    async def _prefill(self, request: _Request) -> tuple[Blocks, float]:
        """Wait for the engine and compute the prompt; returns its blocks and when its first token is due."""
        async with self._turn:
            blocks = request.blocks = await self._take_blocks(request)
            self._waiting.discard(request)
            self._running.add(request)
            cached_tokens = blocks.found * BLOCK_TOKENS
            begins_s = max(request.arrived_s, self._prefilled_s)
            self._metrics.scheduled(request.prompt_tokens, cached_tokens, begins_s - request.arrived_s)
            self._prefilled_s = begins_s + self._timing.prefill_s(request.prompt_tokens - cached_tokens)
            try:
                await _sleep_until(self._prefilled_s)
            except asyncio.CancelledError:
                self._prefilled_s = _now_s()
                raise
            self._cache.publish(blocks, request.hashes)
            return blocks, self._prefilled_s + self._timing.overhead_s

    async def _take_blocks(self, request: _Request) -> Blocks:
        # At least the last token is computed, for its logits. Room for the whole answer is taken at once, so
        # the simulated engine never has to preempt.
        reusable = request.hashes[: (request.prompt_tokens - 1) // BLOCK_TOKENS]
        needed = -(-(request.prompt_tokens + request.max_tokens) // BLOCK_TOKENS)
        while (blocks := self._cache.acquire(reusable, needed)) is None:
            self._freed.clear()
            await self._freed.wait()
            self._prefilled_s = _now_s()
        return blocks

    def _forget(self, request: _Request, parent: int) -> None:
        for requests in (self._waiting, self._running, self._without_token):
            requests.discard(request)
        if request.blocks:
            if request.output:
                # The answer stays cached too, for the next turn's prompt begins with it; but for its last
                # token, which was sampled and never run through the model.
                hashes = request.hashes
                tail = request.prompt[len(hashes) * BLOCK_TOKENS * TOKEN_BYTES :]
                answer = "".join(request.output[:-1]).encode()
                self._cache.publish(
                    request.blocks, hashes + block_hashes(tail + answer, hashes[-1] if hashes else parent)
                )
            self._cache.release(request.blocks)
            self._freed.set()


def _now_s() -> float:
    return asyncio.get_running_loop().time()


async def _sleep_until(deadline_s: float) -> None:
    await asyncio.sleep(max(0.0, deadline_s - _now_s()))
