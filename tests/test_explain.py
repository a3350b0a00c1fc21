"""`extproc explain`: always an answer, and never an id of a session in it."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.core.features import FeatureSettings
from extproc.core.replica import Replica
from extproc.core.router import Router
from extproc.explain import explain

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = FeatureSettings()
CHAT = {
    "model": "m1",
    "messages": [{"role": "system", "content": "You mend bicycles. " * 40}, {"role": "user", "content": "hub?"}],
}
REQUEST = {"path": "/v1/chat/completions", "headers": {"X-Session-ID": "my-secret-id"}, "body": CHAT}
KEYS = {"api", "model", "conversation_key", "conversation_source", "rungs", "prompt_bytes", "truncated", "notes"}


def command(text: bytes, *arguments: str) -> list[dict[str, Any]]:
    """The verb in a process of its own; one object of its output each."""
    done = subprocess.run(
        [sys.executable, "-m", "extproc", "explain", *arguments],
        input=text,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    output = done.stdout.decode("ascii")
    return [json.loads(line) for line in output.splitlines()] if "--jsonl" in arguments else [json.loads(output)]


def test_says_what_is_seen_but_no_id() -> None:
    explanation = explain(REQUEST, SETTINGS)
    assert explanation.keys() >= KEYS
    assert (explanation["api"], explanation["model"]) == ("chat", "m1")
    assert explanation["conversation_source"] == "header:x-session-id"
    assert len(bytes.fromhex(explanation["conversation_key"])) == 16
    assert [rung["offset"] for rung in explanation["rungs"]] == sorted(rung["offset"] for rung in explanation["rungs"])
    assert explanation["system_offset"] in [rung["offset"] for rung in explanation["rungs"]]
    assert explanation["notes"] == []
    assert "my-secret-id" not in json.dumps(explanation)


def test_one_body_however_it_is_given() -> None:
    text = json.dumps(CHAT)
    bodies = (
        {"body": CHAT},
        {"body": text},
        {"body_text": text},
        {"body_base64": base64.b64encode(text.encode()).decode()},
    )
    found = [explain({"path": "/v1/chat/completions", **body}, SETTINGS) for body in bodies]
    assert all(each == found[0] for each in found)
    assert found[0]["conversation_source"] == "prompt"


def test_headers_as_an_object_or_as_pairs() -> None:
    for headers in (
        [["X-Session-ID", "s"]],
        {"x-session-id": ["old", "s"]},
        [["x-session-id", "old"], ["x-session-id", "s"]],
    ):
        assert explain({**REQUEST, "headers": headers}, SETTINGS) == explain(
            {**REQUEST, "headers": {"x-session-id": "s"}}, SETTINGS
        )
    assert explain({**REQUEST, "headers": {"x-session-id": 7}}, SETTINGS) == explain(
        {**REQUEST, "headers": {"x-session-id": "7"}}, SETTINGS
    )


def test_a_head_is_told_by_its_declared_length() -> None:
    text = json.dumps(CHAT)
    head = {"path": "/v1/chat/completions", "headers": {"content-length": str(len(text))}, "body_text": text[:700]}
    explanation = explain(head, SETTINGS)
    assert explanation["truncated"]
    assert explanation["prompt_bytes"] == pytest.approx(
        explain({**head, "body_text": text}, SETTINGS)["prompt_bytes"], rel=0.1
    )
    assert not explain({**head, "body_text": text}, SETTINGS)["truncated"]
    assert explain({**REQUEST, "truncated": True}, SETTINGS)["truncated"]


@pytest.mark.parametrize(
    "document",
    [
        None,
        7,
        [],
        "x",
        {},
        {"path": 7, "headers": 7},
        {"path": "/v1/chat/completions", "headers": [1, ["a"], ["a", None], {"a": 1}], "body_text": 7},
        {"path": "/v1/chat/completions", "body_base64": "no base64!"},
        {"path": "/v1/chat/completions", "body": {}, "body_text": "{}"},
    ],
)
def test_what_is_odd_is_said_in_notes(document: Any) -> None:
    explanation = explain(document, SETTINGS)
    assert explanation.keys() >= KEYS
    assert explanation["conversation_source"] is None
    assert len(explanation["notes"]) > 1


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
PARTS = {
    "path": st.sampled_from(["/v1/chat/completions", "/v1/messages", "/v1/completions"]) | ANYTHING,
    "headers": st.dictionaries(st.sampled_from(["content-length", "X-Session-Id", "authorization"]), ANYTHING)
    | ANYTHING,
    "method": ANYTHING,
    "truncated": ANYTHING,
    "body": ANYTHING,
    "body_text": ANYTHING,
    "body_base64": ANYTHING,
}


@settings(deadline=None)
@given(st.fixed_dictionaries({}, optional=PARTS) | ANYTHING)
def test_never_raises(document: Any) -> None:
    json.dumps(explain(document, SETTINGS))


def test_a_router_adds_the_order_and_the_candidates_and_stays_as_it_is() -> None:
    router = Router()
    router.set_members([Replica(f"r{index}", f"10.0.0.{index}:8000") for index in range(4)], 0.0)
    explanation = explain(REQUEST, SETTINGS, router)
    assert sorted(explanation["preference"]) == ["r0", "r1", "r2", "r3"]
    assert explanation["primary"] == explanation["preference"][0]
    assert explanation["replica"] in {candidate["replica"] for candidate in explanation["candidates"]}
    assert explanation["reason"] in ("session", "cold")
    assert all(candidate["work_tokens"] > 0 for candidate in explanation["candidates"])
    assert router.open_leases == 0
    assert explain(REQUEST, SETTINGS, router) == explanation


def test_the_verb() -> None:
    (explanation,) = command(json.dumps(REQUEST).encode())
    assert explanation == explain(REQUEST, SETTINGS)


def test_the_verb_reads_lines() -> None:
    lines = [
        json.dumps(REQUEST).encode(),
        b"",
        b"not json",
        b"\xff",
        b"[" * 100_000,
        json.dumps({"path": "/v1/models"}).encode(),
    ]
    found = command(b"\n".join(lines), "--jsonl")
    assert [each["conversation_source"] for each in found] == ["header:x-session-id", None, None, None, None]
    assert all("no JSON" in each["notes"][0] for each in found[1:4])


def test_the_verb_reads_nothing() -> None:
    (explanation,) = command(b"")
    assert explanation["notes"]


def test_the_verb_weighs_the_fleet_of_a_configuration(tmp_path: Path) -> None:
    config = tmp_path / "extproc.toml"
    config.write_text(
        """
        [membership]
        source = "static"
        ask_models = false
        replicas = [{endpoint = "127.0.0.1:9", id = "a"}, {endpoint = "127.0.0.2:9", id = "b"}]
        [features]
        session_headers = ["x-chat"]
        """
    )
    chat = {**REQUEST, "headers": {"x-session-id": "ignored", "x-chat": "c"}}
    (explanation,) = command(json.dumps(chat).encode(), "--config", str(config))
    assert explanation["conversation_source"] == "header:x-chat"
    assert sorted(explanation["preference"]) == ["a", "b"]
    assert len(explanation["candidates"]) == 2
    assert [note.split()[0] for note in explanation["notes"]] == ["a", "b"], (
        "nobody listens there, so nobody tells its load"
    )


def test_the_verb_does_without_a_configuration_that_is_wrong(tmp_path: Path) -> None:
    config = tmp_path / "extproc.toml"
    config.write_text("[features]\nsession_heders = []\n")
    (explanation,) = command(json.dumps(REQUEST).encode(), "--config", str(config))
    assert explanation["conversation_source"] == "header:x-session-id"
    assert any("session_heders" in note for note in explanation["notes"])
