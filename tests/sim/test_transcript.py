"""What the simulated router is shown has the structure of what `extract` finds in real bodies."""

from __future__ import annotations

import json

from extproc.core.features import Features, FeatureSettings, extract
from extproc.core.request import Request
from sim.transcript import BYTES_PER_TOKEN, Transcript


def chat(*messages: tuple[str, str]) -> Features:
    body = {"model": "m", "messages": [{"role": role, "content": text} for role, text in messages], "stream": True}
    return extract(Request("POST", "/v1/chat/completions", {}, json.dumps(body).encode()), FeatureSettings())


def shared(one: Features, other: Features) -> int:
    """How many rungs two requests have in common."""
    return len({rung.signature for rung in one.rungs} & {rung.signature for rung in other.rungs})


def text(label: str, tokens: int) -> str:
    return (f"{label} " * (tokens * BYTES_PER_TOKEN))[: tokens * BYTES_PER_TOKEN]


def pieces(*parts: tuple[int, int]) -> Features:
    """Roles alternate from the system's on."""
    transcript = Transcript(16)
    for number, (label, tokens) in enumerate(parts):
        transcript.append(label, tokens)
        if number == 0:
            transcript.end_system()
        if number == 1:
            transcript.end_opening()
    return transcript.features()


def test_as_many_rungs_are_shared_as_with_real_bodies() -> None:
    system, question, other, answer = ("s", 1000), ("q", 300), ("o", 300), ("a", 200)
    real = [
        chat(*((role, text(*part)) for role, part in zip(("system", "user", "assistant", "user"), parts, strict=False)))
        for parts in ((system, question), (system, other), (system, question, answer, other))
    ]
    made = [pieces((1, 1000), (2, 300)), pieces((1, 1000), (3, 300)), pieces((1, 1000), (2, 300), (4, 200), (3, 300))]
    for one in range(3):
        assert len(made[one].rungs) == len(real[one].rungs)
        assert made[one].system_rung is not None and real[one].system_rung is not None
        for another in range(3):
            assert shared(made[one], made[another]) == shared(real[one], real[another])
            same_key = real[one].conversation_key == real[another].conversation_key
            assert (made[one].conversation_key == made[another].conversation_key) is same_key
    assert made[0].conversation_source == real[0].conversation_source == "prompt"
    # Offsets differ by what separates turns and names roles, a few bytes each.
    for ours, theirs in zip(made[2].rungs, real[2].rungs, strict=True):
        assert abs(ours.offset_bytes - theirs.offset_bytes) <= 40


def test_a_prompt_without_turns_is_known_by_its_first_4_kib_as_real_ones_are() -> None:
    def completion(prompt: str) -> Features:
        body = json.dumps({"prompt": prompt}).encode()
        return extract(Request("POST", "/v1/completions", {}, body), FeatureSettings())

    def plain(*parts: tuple[int, int]) -> Features:
        transcript = Transcript(512)
        for part in parts:
            transcript.append(*part)
        return transcript.features()

    real = completion(text("x", 3000)), completion(text("x", 3000) + "more"), completion(text("x", 50))
    made = plain((1, 3000)), plain((1, 3000), (2, 1)), plain((1, 50))
    assert [len(features.rungs) for features in made] == [len(features.rungs) for features in real]
    assert [f.rungs[-1].offset_bytes for f in made] == [f.rungs[-1].offset_bytes for f in real]
    for features in (*made, *real):
        below = [rung for rung in features.rungs if rung.offset_bytes <= 4096]
        assert features.conversation_key == below[-1].signature
        assert features.system_rung is None


def test_blocks_and_rungs_agree_where_prompts_do() -> None:
    one, other = Transcript(16), Transcript(16)
    for transcript in (one, other):
        transcript.append(1, 100)
    one.append(2, 100)
    other.append(3, 100)
    same = [a == b for a, b in zip(one.blocks, other.blocks, strict=True)]
    assert same == [True] * 6 + [False] * 6  # the seventh block holds tokens of both pieces
    rungs = zip(one.features().rungs, other.features().rungs, strict=True)
    assert [(a.offset_bytes, a == b) for a, b in rungs] == [(512, False)]


def test_a_session_id_is_the_key_where_there_is_one() -> None:
    transcript = Transcript(16)
    transcript.append(1, 500)
    named = transcript.features(session=7)
    assert named.conversation_source == "header:x-session-id"
    assert named.conversation_key == transcript.features(session=7).conversation_key
    assert named.conversation_key != transcript.features(session=8).conversation_key
    assert named.rungs == transcript.features().rungs
