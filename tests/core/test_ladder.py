"""The rungs of a prompt; and that they are the same in every release."""

from __future__ import annotations

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.ladder import climb, scope_key

KEY = bytes(range(32))
STREAM = bytes(index * 7 % 251 for index in range(5000))

GOLDEN = [
    (512, "8765f0c88ce5abad71da4b7b6560b60c"),
    (700, "b2465806b93c437c5855cb5e2461947d"),
    (1024, "66f70252abc42c04dc38c913e364db74"),
    (2048, "d5ad91002fbfc3fb8025816e561abe48"),
    (4096, "1cff995843dcbfbef394afe499de5608"),
]


@pytest.mark.parametrize(
    ("length", "boundaries", "expected"),
    [
        (0, [], []),
        (1, [], []),
        (511, [], []),
        (511, [511], [511]),
        (300, [0, 400], []),
        (512, [], [512]),
        (1023, [], [512]),
        (1024, [], [512, 1024]),
        (300, [120], [120]),
        (300, [120, 300], [120, 300]),
        (5000, [700, 512], [512, 700, 1024, 2048, 4096]),
    ],
)
def test_offsets(length: int, boundaries: list[int], expected: list[int]) -> None:
    assert [rung.offset_bytes for rung in climb(bytes(length), boundaries, KEY)] == expected


def test_a_long_prompt_has_few_rungs() -> None:
    assert len(climb(bytes(64 * 1024 * 1024), [], KEY)) == 18


@given(st.binary(max_size=3000), st.binary(max_size=3000), st.sets(st.integers(1, 3000), max_size=3))
def test_two_prompts_share_the_rungs_up_to_where_they_part(one: bytes, two: bytes, boundaries: set[int]) -> None:
    common = b"same " * 150
    ladders = [
        {rung.offset_bytes: rung.signature for rung in climb(stream, boundaries, KEY)}
        for stream in (common + one, common + two)
    ]
    parted = len(common) + next(
        (i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two))
    )
    for offset in ladders[0].keys() & ladders[1].keys():
        assert (ladders[0][offset] == ladders[1][offset]) == (offset <= parted or one == two)


def test_a_rung_is_the_keyed_hash_of_the_beginning() -> None:
    for rung in climb(STREAM, [700], KEY):
        assert rung.signature == blake3(STREAM[: rung.offset_bytes], key=KEY).digest(length=16)


def test_no_rung_is_shared_between_scopes() -> None:
    one, two = (climb(STREAM, [700], key) for key in (KEY, bytes(32)))
    assert not {rung.signature for rung in one} & {rung.signature for rung in two}


def test_golden_signatures() -> None:
    """A change of these moves every conversation of every fleet: it needs a reason and a line in the changelog."""
    assert [(rung.offset_bytes, rung.signature.hex()) for rung in climb(STREAM, [700], KEY)] == GOLDEN


def test_scopes_count_by_place_and_length() -> None:
    keys = {
        scope_key(*parts) for parts in (("", b"ab", b"c"), ("", b"a", b"bc"), ("", b"", b"abc"), ("s", b"ab", b"c"))
    }
    assert len(keys) == 4
    assert scope_key("", b"prefix", b"m1").hex() == "fcf940169dcf6c4964aec68f1150a29aa9f946691ac63fa239c02f6f4d60c369"
