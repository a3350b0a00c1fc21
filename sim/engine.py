"""One replica: an engine with continuous batching, chunked prefill and a prefix cache, as vLLM schedules it.

Work is done in steps. A step serves every running request at once: one token for each that decodes, and prefill
chunks, first come, first served, within a budget of tokens. A request is admitted when its prompt's blocks fit
beside those of the running ones; where an answer outgrows them, the youngest request is preempted, and recomputed
later (docs.vllm.ai, "Optimization and Tuning").

Steps without prefill are alike, so they are taken in one stride up to the next that ends a request or needs a block;
an arrival shortens the stride to the step in which it falls.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from serve_app.engine.cache import PrefixCache
from serve_app.engine.core import KV_CACHE_TOKENS
from serve_app.engine.timing import Timing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.turn import Turn, Visit

_TIMING: Final = Timing()


@dataclass(frozen=True, slots=True)
class EngineModel:
    """How fast a replica is; by default one of eight H100s with a 405-billion-parameter model, as in serve_app.engine.

    prefill_tokens_per_s, step_overhead_s: a 4,096-token prompt takes 400 ms on a miss, 12 ms on a hit.
    decode_step_s: no step that decodes is shorter; the weights have to be read.
    attention_s_per_token: reading the KV cache, per token of context of each decoding request: 126 layers x 8 heads x
        128 x K and V x 2 bytes = 516 kB at 8 x 3.35 TB/s.
    step_tokens: vLLM's max_num_batched_tokens; 2,048 is what its tuning guide advises for steady streams.
    max_running: vLLM's max_num_seqs.
    """

    prefill_tokens_per_s: float = _TIMING.prefill_tokens_per_s
    step_overhead_s: float = _TIMING.overhead_s
    decode_step_s: float = _TIMING.decode_s_per_token
    attention_s_per_token: float = 126 * 8 * 128 * 2 * 2 / (8 * 3.35e12)
    step_tokens: int = 2048
    max_running: int = 256
    kv_tokens: int = KV_CACHE_TOKENS

    def step_s(self, prefill_tokens: int, context_tokens: int) -> float:
        """Duration of one step. context_tokens: of all decoding requests, 0 where there are none."""
        computing_s = self.step_overhead_s + prefill_tokens / self.prefill_tokens_per_s
        if not context_tokens:
            return computing_s
        return max(computing_s, self.decode_step_s) + context_tokens * self.attention_s_per_token

    def wait_s(self, prefill_tokens: float, context_tokens: int) -> float:
        """How long so much prefill takes beside requests that decode."""
        full, rest = divmod(prefill_tokens, self.step_tokens)
        return full * self.step_s(self.step_tokens, context_tokens) + self.step_s(int(rest), context_tokens)


class Engine:
    """next_s: when its current stride ends, infinity while idle. busy_s: time spent in steps.

    waiting: not admitted yet. prefilling: admitted, no token yet. preempted: how often that happened.
    prompt_tokens, cached_tokens: of all prompts so far; like vLLM's counters they move at a prompt's first token.
    """

    def __init__(self, model: EngineModel, block_tokens: int) -> None:
        self.model = model
        self.block_tokens = block_tokens
        self.cache = PrefixCache(model.kv_tokens // block_tokens)
        self.waiting: deque[Visit] = deque()
        self.prefilling: list[Visit] = []
        self.next_s = math.inf
        self.busy_s = 0.0
        self.preempted = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._decoding: dict[Visit, None] = {}  # in order of their first tokens
        self._context_tokens = 0
        self._steps = 0
        self._milestones: list[tuple[int, int, Visit]] = []  # (step, serial, visit): its end, or its blocks are full
        self._serial = 0
        self._began_s = 0.0
        self._step_s = 0.0
        self._stride = 0
        self._chunks: list[tuple[Visit, int]] = []

    # ----------------------------------------------------------------------------------------------- to be looked at

    @property
    def running(self) -> int:
        return len(self.prefilling) + len(self._decoding)

    @property
    def in_flight(self) -> int:
        return len(self.waiting) + self.running

    @property
    def kv_usage(self) -> float:
        """vLLM's kv_cache_usage_perc, 0..1."""
        return self.cache.held_blocks / self.cache.capacity_blocks

    @property
    def decoding_tokens(self) -> int:
        """Context of all decoding requests."""
        return self._context_tokens

    def cached_prefix_tokens(self, turn: Turn) -> int:
        """How much of a prompt the cache would serve now."""
        return self._reusable(turn, self.cache.matched(turn.blocks[: self._whole_blocks(turn)]))

    def expected_prefix_tokens(self, turn: Turn) -> int:
        """The same once everything admitted or waiting has been computed."""
        blocks = turn.blocks[: self._whole_blocks(turn)]
        matched = self.cache.matched(blocks)
        for visit in (*self.prefilling, *self.waiting):
            matched = max(matched, _common(blocks, visit.turn.blocks, self._whole_blocks(visit.turn)))
        return self._reusable(turn, matched)

    def outstanding_tokens(self, now_s: float) -> float:
        """Prefill that is still to be done."""
        left = sum(visit.left_tokens for visit in self.prefilling) + sum(v.expected_tokens for v in self.waiting)
        done = sum(chunk for _, chunk in self._chunks)
        return left - done * min(1.0, (now_s - self._began_s) / self._step_s) if done else left

    def expected_ttft_s(self, turn: Turn, now_s: float) -> float:
        """How long a turn that came now would wait for its first token, with all that can be known."""
        left = self.outstanding_tokens(now_s) + turn.prompt_tokens - self.expected_prefix_tokens(turn)
        return self.model.wait_s(left, self._context_tokens)

    # --------------------------------------------------------------------------------------------------------- events

    def submit(self, visit: Visit, now_s: float) -> None:
        """A request arrives. Raises ValueError where the cache can never hold it."""
        turn = visit.turn
        if turn.prompt_tokens + turn.output_tokens > self.cache.capacity_blocks * self.block_tokens:
            raise ValueError(f"a turn of {turn.prompt_tokens + turn.output_tokens} tokens does not fit into the cache")
        visit.expected_tokens = turn.prompt_tokens - self.expected_prefix_tokens(turn)
        self.waiting.append(visit)
        if self.next_s == math.inf:
            self._begin(now_s)
        elif not self._chunks and self._stride > 1:
            self._stride = min(self._stride, int((now_s - self._began_s) / self._step_s) + 1)
            self.next_s = self._began_s + self._stride * self._step_s

    def advance(self) -> tuple[list[Visit], list[Visit]]:
        """Let the current stride end and begin the next. Returns (those with a first token, those that finished)."""
        now_s = self.next_s
        self.busy_s += now_s - self._began_s
        self._steps += self._stride
        self._context_tokens += self._stride * len(self._decoding)
        finished: list[Visit] = []
        while self._milestones and self._milestones[0][0] <= self._steps:
            _, _, visit = heapq.heappop(self._milestones)
            if visit not in self._decoding or visit.finish_step < 0:
                continue  # preempted since
            if visit.finish_step <= self._steps:
                self._finish(visit, now_s, finished)
            else:
                self._grow(visit)
        started: list[Visit] = []
        for visit, chunk in self._chunks:
            if visit.blocks is None:
                continue  # preempted just now
            visit.left_tokens -= chunk
            if not visit.left_tokens:
                self._start_decoding(visit, now_s, started, finished)
        self._begin(now_s)
        return started, finished

    # ------------------------------------------------------------------------------------------------------ internals

    def _begin(self, now_s: float) -> None:
        """Plan the next stride."""
        self._began_s = now_s
        self._chunks = []
        budget = self.model.step_tokens - len(self._decoding)
        for visit in self.prefilling:
            budget -= self._chunk(visit, budget)
        while self.waiting and budget > 0 and self.running < self.model.max_running and self._admit(self.waiting[0]):
            visit = self.waiting.popleft()
            self.prefilling.append(visit)
            budget -= self._chunk(visit, budget)
        prefill_tokens = sum(chunk for _, chunk in self._chunks)
        self._step_s = self.model.step_s(prefill_tokens, self._context_tokens)
        if self._chunks:
            self._stride = 1
        elif self._milestones:
            self._stride = max(1, self._milestones[0][0] - self._steps)
        else:
            self.next_s = math.inf
            return
        self.next_s = now_s + self._stride * self._step_s

    def _chunk(self, visit: Visit, budget: int) -> int:
        chunk = min(visit.left_tokens, budget)
        if chunk > 0:
            self._chunks.append((visit, chunk))
            # Found by others from now on, even in the same step, as in vLLM.
            self._publish(visit, visit.context_tokens - visit.left_tokens + chunk)
        return max(chunk, 0)

    def _admit(self, visit: Visit) -> bool:
        turn = visit.turn
        reusable = turn.blocks[: (visit.context_tokens - 1) // self.block_tokens]
        needed = -(-visit.context_tokens // self.block_tokens)
        blocks = self.cache.acquire(reusable, needed)
        if blocks is None:
            return False
        visit.blocks = blocks
        visit.room_tokens = needed * self.block_tokens
        cached = blocks.found * self.block_tokens
        visit.left_tokens = visit.context_tokens - cached
        if not visit.output_tokens:
            visit.cached_tokens = cached
        return True

    def _start_decoding(self, visit: Visit, now_s: float, started: list[Visit], finished: list[Visit]) -> None:
        self.prefilling.remove(visit)
        self._decoding[visit] = None
        self._context_tokens += visit.context_tokens
        if not visit.output_tokens:
            visit.first_token_s = now_s
            self.prompt_tokens += visit.turn.prompt_tokens
            self.cached_tokens += visit.cached_tokens
            started.append(visit)
        visit.output_tokens += 1
        self._context_tokens += 1
        visit.finish_step = self._steps + visit.turn.output_tokens - visit.output_tokens
        if visit.finish_step <= self._steps:
            self._finish(visit, now_s, finished)
        else:
            self._plan(visit)

    def _plan(self, visit: Visit) -> None:
        """Its next milestone: the end, or the step after which its blocks are full."""
        left = visit.finish_step - self._steps
        generated = visit.turn.output_tokens - left
        room = visit.room_tokens - visit.turn.prompt_tokens - generated
        self._serial += 1
        heapq.heappush(self._milestones, (self._steps + min(left, max(room, 0) + 1), self._serial, visit))

    def _grow(self, visit: Visit) -> None:
        """One more block for its answer, if need be at the cost of the youngest."""
        assert visit.blocks is not None
        while (grown := self.cache.acquire((), 1)) is None:
            youngest = self.prefilling[-1] if self.prefilling else next(reversed(self._decoding))
            self._preempt(youngest)
            if youngest is visit:
                return
        visit.blocks.fresh += grown.fresh
        visit.room_tokens += self.block_tokens
        self._plan(visit)

    def _preempt(self, visit: Visit) -> None:
        assert visit.blocks is not None
        self.preempted += 1
        if visit in self._decoding:
            del self._decoding[visit]
            visit.output_tokens = visit.turn.output_tokens - (visit.finish_step - self._steps)
            self._context_tokens -= visit.context_tokens
            visit.finish_step = -1
            visit.left_tokens = 0
        else:
            self.prefilling.remove(visit)
        self._publish(visit, visit.context_tokens - visit.left_tokens)
        self.cache.release(visit.blocks)
        visit.blocks = None
        visit.expected_tokens = visit.context_tokens
        self.waiting.appendleft(visit)

    def _finish(self, visit: Visit, now_s: float, finished: list[Visit]) -> None:
        assert visit.blocks is not None
        del self._decoding[visit]
        visit.output_tokens = visit.turn.output_tokens
        self._context_tokens -= visit.context_tokens
        visit.finished_s = now_s
        # The last token was sampled and never run through the model.
        self._publish(visit, visit.context_tokens - 1)
        self.cache.release(visit.blocks)
        visit.blocks = None
        finished.append(visit)

    def _publish(self, visit: Visit, tokens: int) -> None:
        assert visit.blocks is not None
        self.cache.publish(visit.blocks, visit.turn.blocks[: tokens // self.block_tokens])

    def _whole_blocks(self, turn: Turn) -> int:
        """Blocks that a cache can serve; the prompt's last token is always computed."""
        return (turn.prompt_tokens - 1) // self.block_tokens

    def _reusable(self, turn: Turn, matched: int) -> int:
        return min(matched, self._whole_blocks(turn)) * self.block_tokens


def _common(blocks: Sequence[int], other: Sequence[int], limit: int) -> int:
    """How many of the first `limit` agree. The hashes are chained, so one that does vouches for all before it."""
    low, high = 0, min(len(blocks), len(other), limit)
    if not high or blocks[0] != other[0]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if blocks[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
