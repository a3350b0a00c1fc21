"""Timing of the simulated engine, exact to the microsecond since time is virtual.

The arithmetic: t(n) = n uncached tokens take n * 388/4080 ms of the engine, the first token comes 12 - t(16) ms after.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from serve_app.engine.cache import BLOCK_TOKENS
from serve_app.engine.core import Engine, EngineSettings, Step
from serve_app.engine.metrics import EngineMetrics
from serve_app.engine.timing import Timing
from tests.serve_app.virtual_time import run
from tests.support.metrics import figure

MS_PER_TOKEN = 388 / 4080
OVERHEAD_MS = 12 - 16 * MS_PER_TOKEN
DECODE_MS = 25


def prompt(tokens: int, letter: str = "x") -> bytes:
    return letter.encode() * 4 * tokens


def engine(kv_cache_tokens: int = 100_000) -> tuple[Engine, EngineMetrics]:
    settings = EngineSettings(kv_cache_tokens=kv_cache_tokens)
    metrics = EngineMetrics("sim", BLOCK_TOKENS, kv_cache_tokens // BLOCK_TOKENS)
    return Engine(settings, metrics), metrics


async def timed(engine: Engine, tokens: bytes, max_tokens: int = 1) -> list[tuple[float, Step]]:
    """Each step with the time of its arrival in ms since the request."""
    clock = asyncio.get_running_loop().time
    start = clock()
    return [((clock() - start) * 1000, step) async for step in engine.generate(tokens, max_tokens)]


async def ttft_ms(engine: Engine, tokens: bytes) -> float:
    return (await timed(engine, tokens))[0][0]


@pytest.mark.parametrize(("uncached", "ms"), [(4096, 400.0), (16, 12.0), (2056, 206.0), (8176, 788.0)])
def test_prefill_is_a_line_through_a_miss_and_a_full_hit(uncached: int, ms: float) -> None:
    timing = Timing()
    assert (timing.prefill_s(uncached) + timing.overhead_s) * 1000 == pytest.approx(ms)


@pytest.mark.parametrize("scale", [0.1, 2.0])
def test_scaling_scales_every_duration(scale: float) -> None:
    scaled = Timing().scaled(scale)
    assert scaled.prefill_s(4096) + scaled.overhead_s == pytest.approx(0.4 * scale)
    assert scaled.decode_s_per_token == pytest.approx(0.025 * scale)


@pytest.mark.parametrize(
    ("tokens", "cached", "ms"),
    [
        # The last token is always computed, so of 4,096 cached tokens 255 whole blocks count: 16 remain.
        (4096, 4080, 12.0),
        (4095, 4080, 15 * MS_PER_TOKEN + OVERHEAD_MS),
        (4097, 4096, 1 * MS_PER_TOKEN + OVERHEAD_MS),
        (4200, 4096, 104 * MS_PER_TOKEN + OVERHEAD_MS),
    ],
)
def test_a_warm_prompt_pays_for_what_is_not_cached(tokens: int, cached: int, ms: float) -> None:
    async def main() -> None:
        warm, _ = engine()
        assert await ttft_ms(warm, prompt(4096)) == pytest.approx(400.0)
        [(at_ms, step)] = await timed(warm, prompt(tokens))
        assert step.prefill.cached_tokens == cached
        assert at_ms == pytest.approx(ms)

    run(main())


def test_prompts_queue_and_the_second_of_a_kind_hits() -> None:
    async def main() -> None:
        cold, _ = engine()
        times = await asyncio.gather(*(ttft_ms(cold, prompt(4096, letter)) for letter in "abb"))
        busy_ms = 4096 * MS_PER_TOKEN
        assert times == pytest.approx(
            [
                busy_ms + OVERHEAD_MS,
                2 * busy_ms + OVERHEAD_MS,
                2 * busy_ms + 16 * MS_PER_TOKEN + OVERHEAD_MS,  # looked up when its turn came: all there
            ]
        )

    run(main())


def test_decoding_is_steady_and_does_not_hold_up_others() -> None:
    async def main() -> None:
        cold, _ = engine()
        first, second = await asyncio.gather(timed(cold, prompt(16), 3), timed(cold, prompt(16, "y"), 3))
        assert [at for at, _ in first] == pytest.approx([12.0, 12.0 + DECODE_MS, 12.0 + 2 * DECODE_MS])
        assert second[0][0] == pytest.approx(12.0 + 16 * MS_PER_TOKEN)
        assert [step.finish_reason for _, step in first] == [None, None, "length"]

    run(main())


def test_the_answer_is_cached_but_for_its_last_token() -> None:
    async def main() -> None:
        warm, _ = engine()
        steps = await timed(warm, prompt(32), max_tokens=33)
        answer = "".join(step.text for _, step in steps)
        # 32 + 33 tokens are known, 32 + 32 computed: 4 whole blocks
        [(_, step)] = await timed(warm, prompt(32) + answer.encode() + prompt(64, "z"))
        assert step.prefill.cached_tokens == 64

    run(main())


def test_without_a_limit_the_engine_ends_by_itself() -> None:
    async def main() -> None:
        cold, _ = engine()
        steps = [step async for step in cold.generate(prompt(16))]
        assert len(steps) == cold.settings.answer_tokens
        assert steps[-1].finish_reason == "stop"

    run(main())


def test_salts_do_not_share_blocks() -> None:
    async def main() -> list[int]:
        warm, _ = engine()
        return [
            step.prefill.cached_tokens
            for salt in ("", "a", "", "a")
            async for step in warm.generate(prompt(160), 1, salt=salt)
        ]

    assert run(main()) == [0, 0, 144, 144]


def test_steps_can_be_long_but_the_first_is_one_token() -> None:
    async def main() -> None:
        cold, _ = engine()
        steps = [step async for step in cold.generate(prompt(16), 10, step_tokens=4)]
        assert [step.output_tokens for step in steps] == [1, 5, 9, 10]

    run(main())


def test_queue_depth_counts_those_still_without_a_token() -> None:
    async def main() -> None:
        cold, _ = engine()
        answers = await asyncio.gather(*(timed(cold, prompt(4096, letter)) for letter in "abc"))
        assert [steps[0][1].prefill.queue_depth for steps in answers] == [2, 1, 0]

    run(main())


@pytest.mark.parametrize(
    ("others_before", "leave_after_ms"),
    [
        pytest.param(1, 100, id="in the queue"),
        pytest.param(0, 100, id="in its prefill"),
        pytest.param(0, 785, id="between prefill and first token"),
        pytest.param(0, 900, id="while decoding"),
    ],
)
def test_whoever_leaves_frees_the_engine(others_before: int, leave_after_ms: int) -> None:
    async def main() -> None:
        cold, metrics = engine()
        others = [asyncio.create_task(ttft_ms(cold, prompt(4096, "o"))) for _ in range(others_before)]
        await asyncio.sleep(0)
        leaver = asyncio.create_task(timed(cold, prompt(8192, "l"), 100))
        done, _ = await asyncio.wait([leaver], timeout=leave_after_ms / 1000)
        assert not done
        leaver.cancel()
        await asyncio.gather(leaver, *others, return_exceptions=True)
        text = metrics.render().decode()
        assert figure(text, "vllm:num_requests_running") == figure(text, "vllm:num_requests_waiting") == 0
        assert figure(text, "vllm:kv_cache_usage_perc") == 0
        assert figure(text, "vllm:request_success_total", finished_reason="abort") == 1
        assert await ttft_ms(cold, prompt(16, "n")) == pytest.approx(12.0), "nothing of the leaver is left"

    run(main())


def test_closing_a_stream_aborts_it() -> None:
    async def main() -> None:
        cold, metrics = engine()
        async with aclosing(cold.generate(prompt(64), 100)) as steps:
            await anext(steps)
            assert figure(metrics.render().decode(), "vllm:num_requests_running") == 1
        assert figure(metrics.render().decode(), "vllm:num_requests_running") == 0

    run(main())


def test_a_request_waits_until_the_cache_has_room() -> None:
    async def main() -> None:
        small, _ = engine(kv_cache_tokens=160)  # 10 blocks; each request needs (64 + 20) tokens = 6
        first, second = await asyncio.gather(timed(small, prompt(64, "a"), 20), timed(small, prompt(64, "b"), 20))
        one_ms = 64 * MS_PER_TOKEN + OVERHEAD_MS
        assert second[0][0] == pytest.approx(first[-1][0] + one_ms)

    run(main())


def test_metrics_count_tokens_by_where_they_came_from() -> None:
    async def main() -> None:
        warm, metrics = engine()
        await timed(warm, prompt(4096))
        await timed(warm, prompt(4096), 3)
        text = metrics.render().decode()
        assert figure(text, "vllm:prefix_cache_queries_total") == 8192
        assert figure(text, "vllm:prefix_cache_hits_total") == 4080
        assert figure(text, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 4080
        assert figure(text, "vllm:prompt_tokens_by_source_total", source="local_compute") == 4112
        assert figure(text, "vllm:generation_tokens_total") == 4
        assert figure(text, "vllm:time_to_first_token_seconds_sum") == pytest.approx(0.412)
        assert figure(text, "vllm:e2e_request_latency_seconds_count") == 2

    run(main())
