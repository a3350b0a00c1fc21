"""Known sessions: what headers alone are good for, and when a body is read all the same."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.features import Features, FeatureSettings, extract
from extproc.core.known import BYTES_PER_UNREAD_TURN, KnownSessions, key_by_headers
from extproc.core.request import Request

SETTINGS = FeatureSettings()
CHAT = "/v1/chat/completions"
FIRST_TURN = 60_000


def chat(turns: int, turn_bytes: int = 1_000, system: str = "Be brief.") -> bytes:
    """A dialogue whose first turn is long, for its rungs to lie far apart."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}, said(0, FIRST_TURN)]
    messages += [said(number, turn_bytes) for number in range(1, turns)]
    return json.dumps({"model": "m", "messages": messages}).encode()


def said(number: int, length: int) -> dict[str, str]:
    return {"role": "assistant" if number % 2 else "user", "content": f"{number}:\n" + "x" * length}


def post(body: bytes, headers: dict[str, str] | None = None, path: str = CHAT) -> Request:
    return Request("POST", path, headers or {"x-session-id": "s"}, body, content_length_bytes=len(body))


class Reader:
    """A router's reading, without the rest of it."""

    def __init__(self, settings: FeatureSettings = SETTINGS) -> None:
        self.settings = settings
        self.known = KnownSessions()

    def read(self, request: Request) -> Features:
        features = extract(request, self.settings)
        self.known.note(features, len(request.body), self.settings)
        return features

    def recall(self, request: Request) -> Features | None:
        key = key_by_headers(request, self.settings)
        return self.known.recall(key, request.path, len(request.body), self.settings) if key is not None else None


@pytest.fixture
def reader() -> Reader:
    """One that has read two turns of a conversation."""
    reader = Reader()
    assert reader.recall(post(chat(1))) is None
    for turns in (1, 2):
        reader.read(post(chat(turns)))
    return reader


def test_a_session_is_known_once_it_was_read(reader: Reader) -> None:
    features = reader.recall(post(chat(3)))
    read = extract(post(chat(3)), SETTINGS)
    assert features is not None
    assert features.conversation_key == read.conversation_key
    assert (features.conversation_source, features.model, features.api) == ("header:x-session-id", "m", read.api)
    assert (features.rungs, features.system_rung) == (read.rungs, read.system_rung)
    assert features.prompt_bytes == pytest.approx(read.prompt_bytes, rel=0.01)
    assert (features.by_headers, features.truncated) == (True, True)
    assert (read.by_headers, read.truncated) == (False, False)


@given(st.lists(st.integers(0, 8_000), min_size=3, max_size=20))
def test_what_is_recalled_is_what_reading_would_say(lengths: list[int]) -> None:
    """Of a conversation that only grows, whatever is escaped in it: key and rungs exactly, the length nearly."""
    reader, messages = Reader(), [{"role": "user", "content": "begin " * 400}]
    for number, length in enumerate(lengths):
        messages.append({"role": "assistant" if number % 2 else "user", "content": '"\n\t' * (length // 3)})
        request = post(json.dumps({"model": "m", "messages": messages}).encode())
        read, recalled = extract(request, SETTINGS), reader.recall(request)
        if recalled is None:
            reader.read(request)
            continue
        assert recalled.conversation_key == read.conversation_key
        assert set(recalled.rungs) <= set(read.rungs)
        assert read.prompt_bytes / 2 < recalled.prompt_bytes < read.prompt_bytes * 2


def test_a_prompt_with_another_rung_is_read(reader: Reader) -> None:
    turns = 3
    while (read := extract(post(chat(turns)), SETTINGS)).rungs[-1].offset_bytes < 65_536:
        assert reader.recall(post(chat(turns))) is not None
        turns += 1
    assert reader.recall(post(chat(turns))) is None
    assert reader.read(post(chat(turns))) == read
    assert reader.recall(post(chat(turns + 1))) is not None


def test_a_shorter_body_is_read(reader: Reader) -> None:
    assert reader.recall(post(chat(4))) is not None
    assert reader.recall(post(chat(3))) is None
    assert reader.recall(post(chat(4))) is not None, "a repetition is as long as what it repeats"


def test_every_so_many_turns_the_body_is_read(reader: Reader) -> None:
    unread = 0
    while reader.recall(post(chat(2))) is not None:
        unread += 1
    assert unread == math.ceil(len(chat(2)) / BYTES_PER_UNREAD_TURN)
    reader.read(post(chat(2)))
    assert reader.recall(post(chat(2))) is not None


@pytest.mark.parametrize(
    "other",
    [
        post(chat(3), {"x-session-id": "another"}),
        post(chat(3), {"x-session-id": "s", "authorization": "another client's"}),
        post(chat(3), {"authorization": "nobody's session"}),
        post(chat(3), path="/other/v1/chat/completions"),
    ],
    ids=["session", "tenant", "no session", "path"],
)
def test_others_are_not_taken_for_it(reader: Reader, other: Request) -> None:
    assert reader.recall(other) is None


def test_a_session_that_begins_anew_each_time_is_always_read_once_that_was_seen(reader: Reader) -> None:
    for number in range(10):
        request = post(chat(3 + number, system=f"Documents found for question {number}"))
        assert (reader.recall(request) is None) is (number > 0)
        reader.read(request)


def test_one_that_is_doubted_is_read_and_then_believed_if_it_continues(reader: Reader) -> None:
    recalled = reader.recall(post(chat(3)))
    assert recalled is not None
    reader.known.doubt(recalled)
    assert reader.recall(post(chat(4))) is None
    reader.read(post(chat(4)))
    assert reader.recall(post(chat(5))) is not None


def test_one_that_was_found_changed_is_not_trusted_until_it_is_continued(reader: Reader) -> None:
    reader.read(post(chat(3, system="Summary of what was said.")))
    assert reader.recall(post(chat(4, system="Summary of what was said."))) is None
    reader.read(post(chat(4, system="Summary of what was said.")))
    assert reader.recall(post(chat(5, system="Summary of what was said."))) is not None


@pytest.mark.parametrize(
    "body",
    [b"\x1f\x8b compressed", b'{"messages": [{"role": "user", "content": "cut', json.dumps({"model": "m"}).encode()],
    ids=["unreadable", "cut off", "no prompt"],
)
def test_what_could_not_be_read_teaches_nothing(reader: Reader, body: bytes) -> None:
    reader.read(post(body))
    assert reader.recall(post(chat(3))) is None


def test_sessions_named_in_the_body_are_not_kept() -> None:
    reader = Reader()
    body = json.dumps({"session_id": "s", "prompt": "x" * 1_000}).encode()
    for _ in range(3):
        reader.read(post(body, {"host": "x"}))
    assert len(reader.known) == 0


def test_the_least_recently_used_go_first() -> None:
    reader = Reader(FeatureSettings(known_sessions=2))
    for name in ("a", "b", "a", "b"):
        reader.read(post(chat(1), {"x-session-id": name}))
    assert reader.recall(post(chat(2), {"x-session-id": "a"})) is not None
    reader.read(post(chat(1), {"x-session-id": "c"}))
    assert len(reader.known) == 2
    assert reader.recall(post(chat(2), {"x-session-id": "b"})) is None
    assert reader.recall(post(chat(2), {"x-session-id": "a"})) is not None


def test_other_settings_forget_all(reader: Reader) -> None:
    reader.settings = FeatureSettings(mask=("date",))
    assert reader.recall(post(chat(3))) is None
    assert len(reader.known) == 0
