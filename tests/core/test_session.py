"""Which of the client's names for its conversation counts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.core.features import Features, FeatureSettings, extract
from tests.support.bodies import head_of, post

SETTINGS = FeatureSettings()
TURNS = [{"role": "user", "content": "hello"}]


def ask(
    headers: dict[str, str] | None = None, settings: FeatureSettings = SETTINGS, api: str = "chat", **fields: Any
) -> Features:
    return extract(post(api, {"model": "m1", "messages": TURNS, "input": "hello", **fields}, headers), settings)


@pytest.mark.parametrize("name", SETTINGS.session_headers)
def test_every_header_of_the_default_list(name: str) -> None:
    assert ask({name: "s-1"}).conversation_source == f"header:{name}"
    assert ask({name: "s-1"}).conversation_key == ask({"x-session-id": "s-1"}).conversation_key
    assert ask({name.replace("-", "_"): "s-1"}).conversation_source == f"header:{name}"


@pytest.mark.parametrize("path", SETTINGS.session_fields)
def test_every_field_of_the_default_list(path: str) -> None:
    value: Any = "s-1"
    for step in reversed(path.split(".")):
        value = {step: value}
    features = ask(**value)
    assert features.conversation_source == f"body:{path}"
    assert features.conversation_key == ask({"x-session-id": "s-1"}).conversation_key


def test_earlier_sources_win_and_headers_come_first() -> None:
    assert ask({"session-id": "b", "x-session-id": "a"}).conversation_source == "header:x-session-id"
    assert ask({"conversation-id": "a"}, session_id="b").conversation_source == "header:conversation-id"
    assert ask(prompt_cache_key="b", session_id="a").conversation_source == "body:session_id"
    assert ask(previous_response_id="resp_1", conversation="c").conversation_source == "body:conversation"


@pytest.mark.parametrize("absent", [None, "", "  ", [], {}, {"id": None}, {"name": "x"}])
def test_what_means_absent_in_a_field_leads_to_the_next_source(absent: Any) -> None:
    assert ask(session_id=absent, prompt_cache_key="k").conversation_source == "body:prompt_cache_key"
    assert ask(session_id=absent).conversation_source == "prompt"


@pytest.mark.parametrize("absent", ["", " \t "])
def test_an_empty_header_leads_to_the_next_source(absent: str) -> None:
    assert ask({"x-session-id": absent, "session-id": "s"}).conversation_source == "header:session-id"
    assert ask({"x-session-id": absent}, session_id="s").conversation_source == "body:session_id"


@pytest.mark.parametrize(
    ("value", "text"), [("7", "7"), (7, "7"), (0, "0"), (1.5, "1.5"), (True, "true"), (" 7 ", "7"), ({"id": 7}, "7")]
)
def test_any_scalar_names_what_its_text_names(value: Any, text: str) -> None:
    assert ask(session_id=value).conversation_key == ask({"x-session-id": text}).conversation_key


def test_ids_are_compared_exactly() -> None:
    ids = ["session-1", "session-12", "Session-1", "session_1", "x" * 100_000, "x" * 100_001, "é", "e\u0301"]
    assert len({ask(session_id=each).conversation_key for each in ids}) == len(ids)


def test_a_user_is_no_conversation() -> None:
    assert ask(user="ada", metadata={"user_id": "ada"}).conversation_source == "prompt"
    by_user = FeatureSettings(session_fields=("user", "metadata.user_id"))
    assert ask(settings=by_user, metadata={"user_id": "ada"}).conversation_source == "body:metadata.user_id"
    assert ask(settings=by_user, user="ada").conversation_source == "body:user"


def test_a_configured_list_replaces_the_default_one_in_any_spelling() -> None:
    settings = FeatureSettings(session_headers=("X_Chat_ID",), session_fields=("a.b.c",))
    assert ask({"x-chat-id": "s"}, settings).conversation_source == "header:x-chat-id"
    assert ask({"x-session-id": "s"}, settings).conversation_source == "prompt"
    assert ask(settings=settings, a={"b": {"c": "s"}}).conversation_source == "body:a.b.c"
    assert ask(settings=settings, a={"b": "s"}).conversation_source == "prompt"


def test_a_session_does_not_depend_on_model_or_prompt() -> None:
    header = {"x-session-id": "s"}
    assert ask(header).conversation_key == ask(header, model="m2", messages=[]).conversation_key


def test_a_session_in_a_header_counts_where_the_body_says_nothing() -> None:
    broken = post("chat", {})
    for body in (b"", b"{", b"[]", b"\xff"):
        request = type(broken)("POST", broken.path, {"x-session-id": "s"}, body)
        assert extract(request, SETTINGS).conversation_source == "header:x-session-id"


@pytest.mark.parametrize("name", ["x-tenant-id", "X_TENANT_ID", "authorization", "x-api-key", "api-key"])
def test_equal_ids_of_two_tenants_never_meet(name: str) -> None:
    one, two = ({name.lower(): tenant, "x-session-id": "s"} for tenant in ("Bearer a", "Bearer b"))
    assert ask(one).conversation_key != ask(two).conversation_key
    assert ask(one).conversation_key != ask({"x-session-id": "s"}).conversation_key
    assert ask(one).rungs == ask(two).rungs, "tenants share the engines' cache"


def test_the_tenant_header_counts_before_credentials() -> None:
    old, new = ({"x-tenant-id": "t", "authorization": token, "x-session-id": "s"} for token in ("Bearer a", "Bearer b"))
    assert ask(old).conversation_key == ask(new).conversation_key


def test_a_secret_moves_every_key() -> None:
    header, secret = {"x-session-id": "s"}, FeatureSettings(secret="between us")
    assert ask(header).conversation_key != ask(header, secret).conversation_key
    assert ask().conversation_key != ask(settings=secret).conversation_key


def test_an_id_that_is_cut_off_is_not_taken_for_another() -> None:
    request = post("chat", {"model": "m1", "session_id": "session-12", "messages": TURNS})
    whole = extract(request, SETTINGS)
    keys = {extract(head_of(request, end), SETTINGS).conversation_key for end in range(len(request.body))}
    assert keys - {None, whole.conversation_key} == set()
    nested = post("chat", {"metadata": {"session_id": "session-12"}, "messages": TURNS})
    cut_inside = nested.body.index(b"session-12") + len("session-1")
    assert extract(head_of(nested, cut_inside), SETTINGS).conversation_source is None


def test_ids_are_not_kept() -> None:
    features = ask({"x-session-id": "secret-id", "authorization": "Bearer secret-token"})
    assert "secret" not in json.dumps(repr(features))


def test_a_tenant_and_an_equal_credential_are_two() -> None:
    tenant, credential = ({name: "t", "x-session-id": "s"} for name in ("x-tenant-id", "authorization"))
    assert ask(tenant).conversation_key != ask(credential).conversation_key


def test_of_two_spellings_of_one_header_that_counts_which_says_something() -> None:
    assert (
        ask({"x-session-id": "s", "x_session_id": ""}).conversation_key == ask({"x-session-id": "s"}).conversation_key
    )
