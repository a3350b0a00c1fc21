"""/debug of the real process: replicas, decisions, and explanations that change nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpHeaders, ProcessingRequest

from demo.wait import wait_until
from tests.component.serving import messages
from tests.support.watched import FLEET

if TYPE_CHECKING:
    from tests.support.watched import Watched

SECRET = "my-secret-session"
PROMPT = "the prompt that nobody may see"
BODY = json.dumps(
    {"model": "m1", "stream": True, "messages": [{"role": "user", "content": PROMPT + " again" * 600}]}
).encode()
DOCUMENT = {"path": "/v1/chat/completions", "headers": {"x-session-id": SECRET}, "body": json.loads(BODY)}


def get(watched: Watched, path: str) -> Any:
    with urllib.request.urlopen(watched.admin + path, timeout=10) as answer:
        return json.load(answer)


def post(watched: Watched, body: bytes) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"{watched.admin}/debug/explain", body, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def answered(watched: Watched) -> None:
    """A request whose answer tells its counts."""
    start = ProcessingRequest(response_headers=HttpHeaders(end_of_stream=True))
    for key, value in {
        ":status": "200",
        "content-type": "text/event-stream",
        "x-queue-depth": "0",
        "x-prompt-tokens": "1000",
        "x-cached-tokens": "900",
    }.items():
        start.response_headers.headers.headers.add(key=key, raw_value=value.encode())
    list(watched.process(iter([*messages(BODY, {"x-session-id": SECRET}), start])))


def test_replicas(watched: Watched) -> None:
    replicas = get(watched, "/debug/replicas")
    assert [replica["id"] for replica in replicas] == list(FLEET)
    first = replicas[0]
    assert (first["endpoint"], first["state"], first["weight"], first["in_flight"]) == (FLEET[0], "ready", 1.0, 0)
    assert first["prefill_tokens_per_s"] == 10_240  # not learned yet
    assert first["kv_usage"] is None  # no engine was asked
    assert first["engine_age_s"] is None


def test_a_decision_is_shown_with_its_end(watched: Watched) -> None:
    answered(watched)
    answered(watched)
    wait_until(lambda: get(watched, "/debug/decisions?n=1")[0]["ended_s"] is not None, "the stream's end is seen")
    newest, oldest = get(watched, "/debug/decisions")
    assert (oldest["serial"], newest["serial"]) == (1, 2)
    assert (newest["api"], newest["model"], newest["reason"]) == ("chat", "m1", "session")
    assert newest["replica"] in FLEET
    assert newest["replica"] == oldest["replica"] == newest["primary"]
    assert newest["conversation"] == oldest["conversation"]
    assert (newest["status"], newest["prompt_tokens"], newest["cached_tokens"]) == (200, 1000, 900)
    assert newest["first_token_s"] <= newest["ended_s"]
    assert oldest["predicted_tokens"] == 0 < newest["predicted_tokens"] <= newest["expected_prompt_tokens"]
    assert oldest["work_tokens"] > newest["work_tokens"] >= 0
    assert newest["decision_us"] > 0


def test_only_the_last_decisions_are_kept(watched: Watched) -> None:
    for _ in range(7):
        watched.route()
    assert [each["serial"] for each in get(watched, "/debug/decisions")] == [7, 6, 5, 4, 3]
    assert [each["serial"] for each in get(watched, "/debug/decisions?n=2")] == [7, 6]
    assert get(watched, "/debug/decisions?n=-3") == []
    state = get(watched, "/debug/state?decision=5")
    assert (state["last_decision"], [each["serial"] for each in state["decisions"]]) == (7, [7, 6])


@pytest.mark.parametrize("path", ["/debug/decisions?n=many", "/debug/decisions?n=nan", "/debug/state?step=inf"])
def test_a_number_that_is_none_is_refused(watched: Watched, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(watched, path)
    assert refused.value.code == 400


def test_steps_add_up(watched: Watched) -> None:
    answered(watched)
    watched.route()
    wait_until(lambda: len(get(watched, "/debug/state")["steps"]) > 1, "two steps have ended", 20.0)
    steps = get(watched, "/debug/state")["steps"]
    assert sum(step["reasons"].get("session", 0) for step in steps) == 1
    assert sum(step["reasons"].get("no_affinity", 0) for step in steps) == 1
    assert sum(step["prompt_tokens"] for step in steps) == 1000
    assert sum(step["cached_tokens"] for step in steps) == 900
    assert [step["first_token_p95_s"] for step in steps if step["first_token_p95_s"] is not None]
    newer = get(watched, f"/debug/state?step={steps[0]['began_unix_s']}")["steps"]
    assert newer[0] == steps[1]


def test_explain_says_where_it_would_go_and_changes_nothing(watched: Watched) -> None:
    status, text = post(watched, json.dumps(DOCUMENT).encode())
    assert status == 200
    first = json.loads(text)
    assert first["reason"] == "session"
    assert sorted(first["preference"]) == sorted(FLEET)
    assert first["replica"] == first["preference"][0] == first["primary"]
    assert [candidate["replica"] for candidate in first["candidates"]] == first["preference"]
    assert all(candidate["work_tokens"] > 0 for candidate in first["candidates"])
    assert json.loads(post(watched, json.dumps(DOCUMENT).encode())[1]) == first  # nothing was remembered
    state = get(watched, "/debug/state")
    assert (state["last_decision"], state["router"]["open_leases"]) == (0, 0)
    assert state["router"]["placement_entries"] == 0

    answered(watched)
    after = json.loads(post(watched, json.dumps(DOCUMENT).encode())[1])
    assert after["replica"] == get(watched, "/debug/decisions")[0]["replica"] == first["replica"]
    # The running router knows what it has just sent there.
    assert after["candidates"][0]["uncached_tokens"] < first["candidates"][0]["uncached_tokens"]


@pytest.mark.parametrize(
    ("body", "status"), [(b"", 400), (b"{", 400), (b"[" * 100_000, 400), (b" " * (1 << 20) + b"{}", 413), (b"[]", 200)]
)
def test_explain_answers_whatever_it_is_sent(watched: Watched, body: bytes, status: int) -> None:
    assert post(watched, body)[0] == status


def test_the_command_asks_a_running_router(watched: Watched) -> None:
    def explain(url: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, "-m", "extproc", "explain", "--live", url],
            input=json.dumps(DOCUMENT).encode(),
            capture_output=True,
            timeout=60,
            check=False,
        )

    done = explain(watched.admin)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(post(watched, json.dumps(DOCUMENT).encode())[1])
    lost = explain("http://127.0.0.1:1")
    assert (lost.returncode, lost.stdout) == (1, b"")
    assert b"http://127.0.0.1:1" in lost.stderr
    assert b"Traceback" not in lost.stderr


def test_neither_prompts_nor_ids_are_shown(watched: Watched) -> None:
    answered(watched)
    shown = b"".join(
        urllib.request.urlopen(watched.admin + path, timeout=10).read()
        for path in ("/", "/metrics", "/debug/state", "/debug/decisions", "/debug/replicas")
    )
    assert b'"serial":1' in shown
    assert SECRET.encode() not in shown
    assert PROMPT.encode() not in shown


def test_every_answer_forbids_what_did_not_come_with_the_page(watched: Watched) -> None:
    for path in ("/", "/healthz", "/debug/state"):
        with urllib.request.urlopen(watched.admin + path, timeout=10) as answer:
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_long_model_name_and_one_that_is_no_unicode_are_shown(watched: Watched) -> None:
    long_name = json.dumps({"model": "m" * 5000 + "\ud800", "messages": [{"role": "user", "content": "x"}]}).encode()
    watched.route(long_name)
    odd = json.dumps({"model": "\ud800", "messages": [{"role": "user", "content": "x"}]}).encode()
    watched.route(odd)
    newest, before = get(watched, "/debug/decisions")
    assert before["model"] == "m" * 100
    assert newest["model"] == "\ud800"
