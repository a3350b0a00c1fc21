"""Block arithmetic of the prefix cache; blocks are named by small numbers here, as if these were their hashes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.cache import BLOCK_TOKENS, Blocks, PrefixCache, block_hashes
from serve_app.engine.prompt import TOKEN_BYTES

BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES


def serve(cache: PrefixCache, hashes: list[int]) -> int:
    """One request from start to end; returns how many of its blocks were found."""
    blocks = cache.acquire(hashes, len(hashes))
    assert blocks is not None
    cache.publish(blocks, hashes)
    cache.release(blocks)
    return blocks.found


@pytest.mark.parametrize(
    ("tokens", "blocks"),
    [(0, 0), (15, 0), (16, 1), (17, 1), (31, 1), (32, 2), (4096, 256)],
)
def test_only_whole_blocks_have_a_hash(tokens: int, blocks: int) -> None:
    assert len(block_hashes(bytes(tokens * TOKEN_BYTES), 0)) == blocks


def test_a_hash_covers_everything_before_its_block() -> None:
    same_tail = [block_hashes(head * BLOCK_BYTES + b"t" * BLOCK_BYTES, 0) for head in (b"a", b"b")]
    assert same_tail[0][1] != same_tail[1][1]
    assert block_hashes(bytes(BLOCK_BYTES), 1) != block_hashes(bytes(BLOCK_BYTES), 2)


def test_a_prompt_continued_has_the_hashes_of_its_head_first() -> None:
    head, tail = b"a" * 3 * BLOCK_BYTES, b"b" * 2 * BLOCK_BYTES
    hashes = block_hashes(head, 0)
    assert block_hashes(head + tail, 0) == hashes + block_hashes(tail, hashes[-1])


def test_hits_are_the_leading_blocks_only() -> None:
    cache = PrefixCache(capacity_blocks=10)
    assert serve(cache, [1, 2, 3]) == 0
    assert serve(cache, [1, 2, 3]) == 3
    assert serve(cache, [1, 2, 9]) == 2
    assert serve(cache, [8, 2, 3]) == 0


def test_the_least_recently_used_goes_first_and_a_tail_before_its_head() -> None:
    cache = PrefixCache(capacity_blocks=5)
    serve(cache, [1, 2, 3])
    serve(cache, [4])
    serve(cache, [5, 6])  # 6 blocks for 5 places: block 3, the tail of the oldest, has gone
    assert serve(cache, [1, 2, 3]) == 2


def test_using_a_block_keeps_it() -> None:
    cache = PrefixCache(capacity_blocks=3)
    serve(cache, [1])
    serve(cache, [2])
    serve(cache, [1])
    serve(cache, [3, 4])  # one place is missing: 2 is older than 1
    assert serve(cache, [1]) == 1
    assert serve(cache, [2]) == 0


def test_blocks_of_running_requests_are_never_evicted() -> None:
    cache = PrefixCache(capacity_blocks=4)
    running = cache.acquire([1, 2], 2)
    assert running is not None
    cache.publish(running, [1, 2])
    serve(cache, [3, 4])
    assert cache.held_blocks == 2
    assert cache.acquire([5, 6, 7], 3) is None, "2 of 4 blocks are held, 3 more don't fit"
    cache.release(running)
    assert serve(cache, [5, 6, 7]) == 0


def test_found_blocks_need_no_room() -> None:
    cache = PrefixCache(capacity_blocks=4)
    first = cache.acquire([1, 2, 3], 3)
    assert first is not None
    cache.publish(first, [1, 2, 3])
    second = cache.acquire([1, 2, 3], 4)  # 3 shared + 1 fresh = 4
    assert second == Blocks(found=3, fresh=1, hashes=[1, 2, 3])
    assert cache.held_blocks == 4


def test_what_an_aborted_request_did_not_compute_cannot_be_found() -> None:
    cache = PrefixCache(capacity_blocks=4)
    aborted = cache.acquire([1, 2], 2)
    assert aborted is not None
    cache.release(aborted)
    assert cache.held_blocks == 0
    assert serve(cache, [1, 2]) == 0


@given(
    capacity=st.integers(4, 12),
    prompts=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), max_size=40),
    running=st.integers(1, 3),
)
def test_it_never_holds_more_than_its_capacity(capacity: int, prompts: list[list[int]], running: int) -> None:
    cache = PrefixCache(capacity)
    held: list[Blocks] = []
    for hashes in prompts:
        blocks = cache.acquire(hashes, len(hashes))
        assert cache.held_blocks <= capacity
        if blocks is not None:
            cache.publish(blocks, hashes)
            held.append(blocks)
        if held and (blocks is None or len(held) > running):
            cache.release(held.pop(0))
    for blocks in held:
        cache.release(blocks)
    assert cache.held_blocks == 0
