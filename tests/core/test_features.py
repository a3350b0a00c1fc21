"""Features as a whole: pure, total, stable as a dialogue grows and as a body is cut."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from extproc.core.api import Api
from extproc.core.features import Features, FeatureSettings, extract
from extproc.core.ladder import FIRST_RUNG_BYTES
from extproc.core.request import Request
from extproc.core.settings import OPENING_LIMIT_BYTES
from tests.support.bodies import BODIES, CHAT, MANUAL, PATHS, PICTURE, head_of, post

SETTINGS = FeatureSettings()
MASKED = FeatureSettings(
    mask=("date", "time", "uuid"), template_fields=("documents", "response_format"), prefix_by_tenant=True, secret="s"
)

FIELDS = [
    *("model", "messages", "input", "prompt", "instructions", "system", "tools", "functions", "documents"),
    *("chat_template", "chat_template_kwargs", "role", "content", "type", "text", "image_url", "input_audio"),
    *("tool_calls", "tool_call_id", "name", "session_id", "conversation", "id", "metadata", "cache_control"),
    *("cache_salt", "response_format", "stream", "previous_response_id", "reasoning_effort"),
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["user", "system", "developer", "assistant", "text", "input_text", "image_url", "\ud83d", "🚲"])
)
JSON: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=4), inner, max_size=6)
    ),
    max_leaves=30,
)
ANY_PATH = st.sampled_from([*PATHS.values(), "/v1/models", "", "?"]) | st.text(max_size=20)


def rungs_of(features: Features) -> dict[int, bytes]:
    return {rung.offset_bytes: rung.signature for rung in features.rungs}


def check(features: Features) -> None:
    """What holds of any features."""
    offsets = [rung.offset_bytes for rung in features.rungs]
    assert offsets == sorted(set(offsets))
    assert all(offset > 0 for offset in offsets)
    assert all(len(rung.signature) == 16 for rung in features.rungs)
    assert (features.conversation_key is None) == (features.conversation_source is None)
    assert features.conversation_key is None or len(features.conversation_key) == 16
    assert features.system_rung is None or features.system_rung in features.rungs
    assert features.conversation_source != "prompt" or features.rungs
    assert features.prompt_bytes >= max(offsets, default=0)


@given(st.binary(max_size=300), ANY_PATH, st.booleans(), st.dictionaries(st.text(max_size=12), st.text(), max_size=4))
@example(b"\xef\xbb\xbf{}", "/v1/messages", True, {})
@example(b'{"messages":[' + b"[" * 5000, "/v1/chat/completions", True, {})
@example(b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}", "/v1/chat/completions", False, {})
@example(b'{"session_id":' + b"9" * 5000 + b"}", "/v1/chat/completions", False, {})
@example(b'{"prompt":[' + b"9" * 4000 + b"]}", "/v1/completions", False, {})
@example(b'{"messages":[{"role":NaN,"content":-Infinity}]}', "/v1/chat/completions", False, {})
@example(b'{"messages":"\xff"}', "/v1/chat/completions", False, {"x-session-id": "\ud800"})
def test_never_raises_on_any_bytes(body: bytes, path: str, truncated: bool, headers: dict[str, str]) -> None:
    headers = {name.lower(): text for name, text in headers.items()}
    for settings in (SETTINGS, MASKED):
        check(extract(Request("POST", path, headers, body, truncated), settings))


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=8), st.sampled_from(list(PATHS.values())), st.data())
def test_never_raises_on_any_json_cut_anywhere(document: dict[str, Any], path: str, data: st.DataObject) -> None:
    request = Request("POST", path, {}, json.dumps(document).encode())
    end = data.draw(st.integers(0, len(request.body)))
    for settings in (SETTINGS, MASKED):
        check(extract(request, settings))
        check(extract(head_of(request, end), settings))


@given(JSON, st.sampled_from(list(PATHS.values())))
def test_is_pure(document: Any, path: str) -> None:
    body = json.dumps(document).encode()
    assert extract(Request("POST", path, {}, body), SETTINGS) == extract(Request("POST", path, {}, body), SETTINGS)


CONTENT = st.text(max_size=600) | st.lists(
    st.builds(lambda text: {"type": "text", "text": text}, st.text(max_size=300)) | st.just(PICTURE), max_size=3
)
TURN = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"]), "content": CONTENT})


@given(
    st.lists(st.fixed_dictionaries({"role": st.just("system"), "content": CONTENT}), max_size=2),
    st.lists(TURN, max_size=2),
    CONTENT,
    st.lists(TURN, max_size=5),
    st.lists(TURN, min_size=1, max_size=3),
)
def test_a_dialogue_that_grows_keeps_its_key_and_its_rungs(
    system: list[Any], greeting: list[Any], first: Any, middle: list[Any], later: list[Any]
) -> None:
    turns = [*system, *greeting, {"role": "user", "content": first}, *middle]
    before = extract(post("chat", {"model": "m1", "messages": turns}, escaped=True), SETTINGS)
    after = extract(post("chat", {"messages": turns + later, "model": "m1", "temperature": 1}, escaped=True), SETTINGS)
    assert before.conversation_source == "prompt"
    assert after.conversation_key == before.conversation_key
    assert rungs_of(after).items() >= rungs_of(before).items()
    assert after.system_rung == before.system_rung


IN_ORDER = [name for name in BODIES if not name.endswith("last")]
"""Bodies in which what a template renders ahead of the turns stands ahead of them."""


@pytest.mark.parametrize("escaped", [False, True], ids=["utf-8", "escapes"])
@pytest.mark.parametrize("name", IN_ORDER)
def test_whole_and_every_cut_agree(name: str, escaped: bool) -> None:
    dialect, document = BODIES[name]
    request = post(dialect, document, escaped=escaped)
    whole, found = extract(request, SETTINGS), 0
    key_offset = next(rung.offset_bytes for rung in whole.rungs if rung.signature == whole.conversation_key)
    for end in range(len(request.body)):
        cut = extract(head_of(request, end), SETTINGS)
        assert rungs_of(cut).items() <= rungs_of(whole).items(), f"cut at {end}"
        assert cut.system_rung in (None, whole.system_rung), f"cut at {end}"
        if key_offset in rungs_of(cut):
            assert cut.conversation_key == whole.conversation_key, f"cut at {end}"
        found = max(found, len(cut.rungs))
    assert found >= len(whole.rungs) - 1


def test_a_session_ahead_of_the_turns_is_found_in_every_head_that_reaches_them() -> None:
    request = post("chat", {"session_id": "s", **CHAT})
    for end in range(request.body.index(b'"messages"'), len(request.body)):
        assert extract(head_of(request, end), SETTINGS).conversation_key == extract(request, SETTINGS).conversation_key


def test_a_head_that_shows_nothing_of_its_own_has_no_affinity() -> None:
    """All requests that begin with a large picture would be one conversation."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 10_000}}
    request = post("chat", {"model": "m1", "messages": [{"role": "user", "content": [picture]}]})
    assert extract(request, SETTINGS).conversation_source == "prompt"
    head = extract(head_of(request, 5000), SETTINGS)
    assert (head.conversation_source, head.rungs) == (None, ())


def test_a_cut_prompt_counts_as_long_as_its_body_says() -> None:
    request = post("chat", {"model": "m1", "messages": [{"role": "user", "content": "word " * 10_000}]})
    whole = extract(request, SETTINGS)
    assert extract(head_of(request, 4096), SETTINGS).prompt_bytes == pytest.approx(whole.prompt_bytes, rel=0.01)
    unknown = replace(head_of(request, 4096), content_length_bytes=None)
    assert extract(unknown, SETTINGS).prompt_bytes < 4096


def test_an_opening_beyond_the_limit_is_recognised_in_every_head_of_that_size() -> None:
    settings = FeatureSettings(opening_limit_bytes=4096)
    system = {"role": "system", "content": MANUAL}
    one, two = (
        post("chat", {"model": "m1", "messages": [system, {"role": "user", "content": f"{intro} " + "word " * 2000}]})
        for intro in ("one", "two")
    )
    keys = {extract(head_of(one, end), settings).conversation_key for end in range(4500, len(one.body), 500)}
    assert keys == {extract(one, settings).conversation_key}
    assert extract(one, settings).conversation_key != extract(two, settings).conversation_key
    assert len(one.body) < OPENING_LIMIT_BYTES
    assert extract(one, SETTINGS).conversation_key not in keys


def test_conversations_under_one_system_prompt_share_its_rung_alone() -> None:
    one, two = (
        extract(
            post("chat", {"messages": [{"role": "system", "content": MANUAL}, {"role": "user", "content": text}]}),
            SETTINGS,
        )
        for text in ("Which hub?", "Which rim?")
    )
    assert one.conversation_key != two.conversation_key
    assert one.system_rung == two.system_rung
    assert one.system_rung is not None
    assert one.rungs[0] == two.rungs[0]
    assert one.rungs[0].offset_bytes == FIRST_RUNG_BYTES


@pytest.mark.parametrize("scope", [{"model": "m2"}, {"cache_salt": "s"}, {"model": None}])
def test_what_shares_no_cache_shares_nothing(scope: dict[str, Any]) -> None:
    one, two = extract(post("chat", CHAT), SETTINGS), extract(post("chat", {**CHAT, **scope}), SETTINGS)
    assert not set(rungs_of(one).values()) & set(rungs_of(two).values())
    assert one.conversation_key != two.conversation_key


def test_prefixes_can_be_kept_apart_by_tenant() -> None:
    apart = FeatureSettings(prefix_by_tenant=True)
    one, two = (post("chat", CHAT, {"authorization": token}) for token in ("Bearer a", "Bearer b"))
    assert extract(one, SETTINGS) == extract(two, SETTINGS)
    assert extract(one, apart).rungs != extract(two, apart).rungs
    assert extract(one, apart).conversation_key != extract(two, apart).conversation_key


def test_one_dialogue_through_two_apis_is_one_conversation() -> None:
    turns = [{"role": "user", "content": "Which hub?"}]
    bodies = (
        ("chat", {"messages": [{"role": "system", "content": MANUAL}, *turns]}),
        ("messages", {"system": MANUAL, "messages": turns}),
        ("responses", {"instructions": MANUAL, "input": turns}),
    )
    assert len({extract(post(*each), SETTINGS).rungs for each in bodies}) == 1


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b"7", b"{}", b'{"messages":[]}', b"\x00\xff", b"{}{}"]
)
def test_a_body_without_a_prompt_has_no_affinity(body: bytes) -> None:
    features = extract(Request("POST", PATHS["chat"], {}, body), SETTINGS)
    assert (features.api, features.conversation_source, features.rungs) == (Api.CHAT, None, ())


def test_another_api_has_no_prompt() -> None:
    body = json.dumps(CHAT).encode()
    features = extract(Request("POST", "/v1/audio/transcriptions", {}, body), SETTINGS)
    assert (features.api, features.conversation_source, features.rungs) == (Api.OTHER, None, ())


def test_what_engines_accept_beyond_strict_json() -> None:
    plain = extract(post("chat", CHAT), SETTINGS)
    body = json.dumps(CHAT).encode()
    for spelled in (b"\xef\xbb\xbf" + body, json.dumps(CHAT).encode("utf-16"), json.dumps(CHAT, indent=3).encode()):
        assert extract(Request("POST", PATHS["chat"], {}, spelled), SETTINGS) == plain


def test_a_text_that_was_cut_within_an_emoji() -> None:
    """JavaScript sends such texts; of a head the part before it counts."""
    text = MANUAL + "\ud83d" + MANUAL
    request = post("chat", {"model": "m1", "messages": [{"role": "user", "content": text}]}, escaped=True)
    whole = extract(request, SETTINGS)
    assert whole.conversation_source == "prompt"
    cut = extract(head_of(request, len(request.body) - 9), SETTINGS)
    assert cut.rungs
    assert rungs_of(cut).items() <= rungs_of(whole).items()
    pairs = post("chat", {"messages": [{"role": "user", "content": "🚲" * 400 + "\udeb2"}]}, escaped=True)
    assert len(extract(head_of(pairs, len(pairs.body) - 3), SETTINGS).rungs) == 2, "whole emoji are no such place"


def test_streams_are_told_apart() -> None:
    assert extract(post("chat", {**CHAT, "stream": True}), SETTINGS).streamed
    assert not extract(post("chat", {**CHAT, "stream": False}), SETTINGS).streamed
    assert not extract(post("chat", {"messages": CHAT["messages"]}), SETTINGS).streamed


def test_settings_that_cant_be_used_are_refused() -> None:
    with pytest.raises(ValueError, match="'months'"):
        FeatureSettings(mask=("date", "months"))
    with pytest.raises(ValueError, match=r"mask pattern '\('"):
        FeatureSettings(mask_patterns=("(",))
    with pytest.raises(ValueError, match="opening_limit_bytes"):
        FeatureSettings(opening_limit_bytes=0)


GOLDEN = {
    "chat": ("2620044ae6f4327bad66bce764a484ab", 2331),
    "chat, template input": ("af031a642a123acb8292612c0a66e40f", 2400),
    "messages": ("b5fe4455d627a50d5e9b19854d4bc0b6", 2001),
    "responses": ("2854f5a53460d54bf2e9a8919b9aa3a1", 1930),
    "completions": ("d714864721b94cbb7b56072be30b1a71", 1808),
    "completions, token ids": ("8d2cc1651faa95f57e8715b051a1423f", 1200),
    "embeddings, texts": ("0318b153f45495320dd18098dee96bc6", 909),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_keys(name: str) -> None:
    """A change of these moves every conversation of every fleet: it needs a reason and a line in the changelog."""
    features = extract(post(*BODIES[name]), SETTINGS)
    assert features.conversation_key is not None
    assert (features.conversation_key.hex(), features.prompt_bytes) == GOLDEN[name]


def test_golden_session_key() -> None:
    features = extract(post("chat", CHAT, {"x-session-id": "s-1", "x-tenant-id": "t"}), SETTINGS)
    assert features.conversation_key is not None
    assert features.conversation_key.hex() == "08231e5ded1da1a05d42e103d07c9d11"


@pytest.mark.parametrize(
    ("method", "path", "source"),
    [
        ("POST", "/v1/rerank", "header:x-session-id"),  # an API that we can't read, but the client named its session
        ("POST", "/v1/files", "header:x-session-id"),
        ("GET", "/v1/models", None),
        ("DELETE", "/v1/responses/1", None),
    ],
)
def test_a_session_header_counts_for_any_post(method: str, path: str, source: str | None) -> None:
    request = Request(method, path, {"x-session-id": "s"}, b'{"session_id": "other", "prompt": "text"}')
    features = extract(request, FeatureSettings())
    assert (features.api, features.conversation_source, features.rungs) == (Api.OTHER, source, ())
