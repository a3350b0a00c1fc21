"""What a decision costs, by the benchmark's own measure.

The bounds are loose, as other work runs beside; the figures to quote are those of `python -m bench.core`.
"""

from __future__ import annotations

from bench.core import HEAD_KIB, cost_of_decision, cost_of_features, features_of_chats

ATTEMPTS = 6
CACHE_MISSES_US = 10.0
"""What a large fleet costs the processor's caches: half of a decision, or more where it is compiled."""


def test_a_decision_among_1024_replicas_costs_hardly_more_than_among_16() -> None:
    chats = features_of_chats(HEAD_KIB * 1024)[:200]
    few_us = many_us = float("inf")
    for _ in range(ATTEMPTS):  # in turns, so that a busy moment of the machine meets both
        few_us = min(few_us, cost_of_decision(16, chats, rounds=3).p50_us)
        many_us = min(many_us, cost_of_decision(1024, chats, rounds=3).p50_us)
        if many_us <= few_us + max(0.5 * few_us, CACHE_MISSES_US):
            return
    raise AssertionError(f"{many_us:.0f} us among 1,024 replicas, {few_us:.0f} us among 16")


def test_reading_and_deciding_take_a_fraction_of_a_millisecond() -> None:
    chats = features_of_chats(HEAD_KIB * 1024)[:200]
    reading_us = min(cost_of_features(HEAD_KIB, requests=50).p50_us for _ in range(3))
    deciding_us = min(cost_of_decision(256, chats, rounds=2).p50_us for _ in range(3))
    assert reading_us + deciding_us < 400
