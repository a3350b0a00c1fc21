"""The engine model: figures that can be worked out by hand, and agreement with the engine that serves HTTP."""

from __future__ import annotations

import asyncio
import math

import pytest
from pytest import approx

from serve_app.engine.core import Engine as ServingEngine
from serve_app.engine.core import EngineSettings
from serve_app.engine.metrics import EngineMetrics
from sim.engine import Engine, EngineModel
from sim.transcript import Transcript
from sim.turn import Turn, Visit

BLOCK = 16
PLAIN = EngineModel(
    prefill_tokens_per_s=1000,
    step_overhead_s=0.0,
    decode_step_s=0.1,
    attention_s_per_token=0.0,
    step_tokens=100,
    kv_tokens=1600,
)
"""1 ms a token, 100 ms a step that decodes."""


def turn(tokens: int, output_tokens: int = 1, label: int = 0, at_s: float = 0.0) -> Turn:
    transcript = Transcript(BLOCK)
    transcript.append(label, tokens)
    features = transcript.features()
    transcript.append(-label - 1, output_tokens)
    return Turn(at_s, tokens, output_tokens, transcript.blocks, features)


def play(engine: Engine, arrivals: list[tuple[float, Turn]]) -> list[Visit]:
    """Let all requests arrive and end."""
    visits = []
    waiting = sorted(arrivals, key=lambda arrival: arrival[0])
    while waiting or engine.next_s < math.inf:
        if waiting and waiting[0][0] < engine.next_s:
            at_s, arriving = waiting.pop(0)
            visits.append(Visit(arriving, at_s))
            engine.submit(visits[-1], at_s)
        else:
            engine.advance()
        assert engine.cache.held_blocks <= engine.cache.capacity_blocks
    assert engine.in_flight == 0 and engine.cache.held_blocks == 0
    return visits


def test_a_prompt_takes_its_tokens_time_and_each_further_token_a_step() -> None:
    [visit] = play(Engine(PLAIN, BLOCK), [(5.0, turn(250, output_tokens=4))])
    assert visit.first_token_s == approx(5.25)
    assert visit.finished_s == approx(5.25 + 3 * 0.1)


def test_the_same_prompt_again_computes_what_whole_blocks_leave() -> None:
    visits = play(Engine(PLAIN, BLOCK), [(0.0, turn(250)), (1.0, turn(250))])
    assert [visit.cached_tokens for visit in visits] == [0, 240]
    assert visits[1].ttft_s == approx(0.010)


def test_a_prompt_of_whole_blocks_computes_its_last_one() -> None:
    visits = play(Engine(PLAIN, BLOCK), [(0.0, turn(160)), (1.0, turn(160))])
    assert visits[1].cached_tokens == 144


def test_the_next_turn_finds_the_answer_too() -> None:
    chat = Transcript(BLOCK)
    chat.append(1, 100)
    first = Turn(0.0, 100, 60, chat.blocks, chat.features())
    chat.append(2, 60)
    chat.append(3, 20)
    second = Turn(0.0, 180, 1, chat.blocks, chat.features())
    visits = play(Engine(PLAIN, BLOCK), [(0.0, first), (100.0, second)])
    assert visits[1].cached_tokens == 144  # 159 tokens were computed: 9 whole blocks


def test_prefill_is_first_come_first_served_in_chunks_that_fill_each_step() -> None:
    visits = play(
        Engine(PLAIN, BLOCK), [(0.0, turn(150, label=1)), (0.01, turn(30, label=2)), (0.02, turn(30, label=3))]
    )
    # Steps of 100 ms and (50 + 30 + 20) 100 ms; the rest of the third is a step of its own.
    assert [visit.first_token_s for visit in visits] == approx([0.2, 0.2, 0.21])


def test_decoding_goes_on_beside_prefill_one_token_a_step() -> None:
    visits = play(Engine(PLAIN, BLOCK), [(0.0, turn(10, output_tokens=3, label=1)), (0.005, turn(250, label=2))])
    # 10 ms; then chunks of 100, beside one that decodes 99, so 99, 99, and 52 alone.
    assert visits[0].finished_s == approx(0.010 + 2 * 0.1)
    assert visits[1].first_token_s == approx(0.010 + 2 * 0.1 + 0.052)


def test_an_arrival_amid_decoding_waits_for_the_step_not_for_the_stride() -> None:
    visits = play(Engine(PLAIN, BLOCK), [(0.0, turn(10, output_tokens=100, label=1)), (1.234, turn(50, label=2))])
    assert visits[1].first_token_s == approx(0.01 + 13 * 0.1 + 0.1)  # 1.31, then a step that also decodes


def test_a_stride_that_an_arrival_cuts_short_costs_the_others_nothing() -> None:
    alone, _ = play(Engine(PLAIN, BLOCK), [(0.0, turn(10, 40, 1)), (99.0, turn(10, 1, 2))])
    interrupted, _ = play(Engine(PLAIN, BLOCK), [(0.0, turn(10, 40, 1)), (1.0, turn(10, 1, 2))])
    assert interrupted.finished_s == approx(alone.finished_s)


def test_least_recently_used_blocks_go_first() -> None:
    first, second, third = (turn(640, label=label) for label in (1, 2, 3))
    engine = Engine(PLAIN, BLOCK)  # 1,600 tokens: two of them and a half
    play(engine, [(0.0, first), (10.0, second), (20.0, first), (30.0, third)])
    assert engine.cached_prefix_tokens(first) == 624
    assert engine.cached_prefix_tokens(second) == 320  # of its head: 21 of its blocks had to go


def test_a_prompt_that_does_not_fit_beside_the_running_ones_waits() -> None:
    visits = play(Engine(PLAIN, BLOCK), [(0.0, turn(1500, output_tokens=5, label=1)), (0.1, turn(800, label=2))])
    assert visits[1].first_token_s == approx(visits[0].finished_s + 0.8)


def test_answers_that_outgrow_the_cache_preempt_the_youngest_which_is_done_again() -> None:
    arrivals = [(0.0, turn(700, output_tokens=300, label=1)), (0.001, turn(700, output_tokens=300, label=2))]
    engine = Engine(PLAIN, BLOCK)
    older, younger = play(engine, arrivals)
    assert engine.preempted == 1
    assert (older.output_tokens, younger.output_tokens) == (300, 300)
    assert older.first_token_s < younger.first_token_s < older.finished_s < younger.finished_s
    # Undisturbed it would have ended with the other one.
    assert younger.finished_s - older.finished_s > 0.1 * 10


def test_what_can_never_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="1601 tokens does not fit"):
        Engine(PLAIN, BLOCK).submit(Visit(turn(1500, output_tokens=101), 0.0), 0.0)


def test_the_expected_wait_is_what_comes_true() -> None:
    engine = Engine(PLAIN, BLOCK)
    engine.submit(Visit(turn(400, label=1), 0.0), 0.0)
    engine.submit(Visit(turn(130, label=2), 0.0), 0.0)
    asked = turn(140, label=2)  # begins like the second and will find 8 of its blocks
    assert engine.outstanding_tokens(0.05) == approx(480)
    expected_s = engine.expected_ttft_s(asked, 0.05)
    visit = Visit(asked, 0.05)
    engine.submit(visit, 0.05)
    while engine.next_s < math.inf:
        engine.advance()
    assert visit.ttft_s == approx(expected_s, abs=0.002)


def test_defaults_are_the_articles_figures() -> None:
    """4,096 tokens: 350 to 500 ms on a miss, at most 12 ms on a hit."""
    miss, hit = play(Engine(EngineModel(), BLOCK), [(0.0, turn(4096)), (5.0, turn(4096))])
    assert 0.350 <= miss.ttft_s <= 0.500
    assert hit.ttft_s <= 0.0121


@pytest.mark.parametrize(("tokens", "again"), [(4096, True), (4096, False), (700, True), (20, False)])
async def test_agrees_with_the_engine_that_serves(tokens: int, again: bool) -> None:
    """Alone on a replica, a request waits as long in the model as in the engine that sleeps in real time."""
    settings = EngineSettings()
    serving = ServingEngine(settings, EngineMetrics("model", BLOCK, settings.kv_cache_tokens // BLOCK))
    prompt = bytes(range(256)) * (tokens * 4 // 256 + 1)
    prompt = prompt[: tokens * 4]

    async def ttft_s() -> float:
        began_s = asyncio.get_running_loop().time()
        async for _ in serving.generate(prompt, 1):
            return asyncio.get_running_loop().time() - began_s
        raise AssertionError("no first token")

    served_s = await ttft_s()
    if again:
        served_s = await ttft_s()
    visits = play(Engine(EngineModel(), BLOCK), [(0.0, turn(tokens)), *([(9.0, turn(tokens))] if again else [])])
    # A step's overhead for each further chunk, and what the event loop adds.
    assert visits[-1].ttft_s == approx(served_s, abs=0.015 + 0.05 * served_s)
