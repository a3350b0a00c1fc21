"""What a decision's span says, whose child it is, and what it does not tell."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, cast

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import SpanKind, StatusCode

from extproc.core.features import FeatureSettings, extract
from extproc.core.replica import EngineLoad, Replica
from extproc.core.request import Request
from extproc.core.router import RouterSettings
from extproc.picker import ResponseStart
from extproc.telemetry import DecisionSpans
from tests.telemetry.conftest import Traced, attributes

if TYPE_CHECKING:
    from collections.abc import Mapping

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
CHAT = "/v1/chat/completions"


def chat(text: str, **headers: str) -> Request:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Request("POST", CHAT, named, json.dumps(body).encode())


GET = Request("GET", "/v1/models?key=hunter2", {})
ALWAYS = {
    "routing.policy": "expected_work",
    "routing.membership_version": 1,
    "routing.stale": False,
    "routing.decision_s": 0.0,
    "routing.truncated": False,
    "routing.by_headers": False,
    "routing.matched_bytes": 0,
    "routing.expected_cached_tokens": 0,
}
AT_A = {
    "server.address": "10.0.0.1",
    "server.port": 8000,
    "routing.replica.id": "a",
    "routing.in_flight": 1,
    "routing.work_tokens": RouterSettings().decode_tokens,
}


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (
            GET,
            {
                "http.request.method": "GET",
                "url.path": "/v1/models",
                "gen_ai.operation.name": "other",
                "routing.reason": "no_affinity",
                "routing.prompt_tokens": 0,
                "routing.candidates": ("a work=0 uncached=0 in_flight=0",),
            },
        ),
        (
            Request("POST", CHAT, {"x-session-id": "mine"}, b"{}"),
            {
                "http.request.method": "POST",
                "url.path": CHAT,
                "gen_ai.operation.name": "chat",
                "routing.reason": "session",
                "routing.conversation_source": "header:x-session-id",
                "routing.primary": "a",
                "routing.prompt_tokens": 0,
                "routing.candidates": ("a work=0 uncached=0 in_flight=0",),
            },
        ),
        (
            Request("POST", "/v1/embeddings", {}, b'{"model": "m", "session_id": "mine"}'),
            {
                "http.request.method": "POST",
                "url.path": "/v1/embeddings",
                "gen_ai.operation.name": "embeddings",
                "gen_ai.request.model": "m",
                "routing.reason": "session",
                "routing.conversation_source": "body:session_id",
                "routing.primary": "a",
                "routing.prompt_tokens": 0,
                "routing.candidates": ("a work=0 uncached=0 in_flight=0",),
            },
        ),
    ],
    ids=["get", "header session", "body session"],
)
def test_attributes(traced: Traced, request_: Request, expected: Mapping[str, Any]) -> None:
    span = traced.route(request_)
    assert (span.name, span.kind) == ("route", SpanKind.SERVER)
    assert span.status.status_code is StatusCode.UNSET
    assert attributes(span) == ALWAYS | AT_A | expected


def test_a_conversation_shows_what_it_finds_again(traced: Traced) -> None:
    first, again = (attributes(traced.route(chat("word " * 2000))) for _ in range(2))
    assert (first["routing.reason"], again["routing.reason"]) == ("cold", "prefix")
    assert first["routing.conversation_source"] == again["routing.conversation_source"] == "prompt"
    assert first["routing.matched_bytes"] == 0
    assert cast("int", again["routing.matched_bytes"]) > 9_000
    assert first["routing.expected_cached_tokens"] == 0
    assert again["routing.expected_cached_tokens"] == again["routing.prompt_tokens"]
    assert first["routing.prompt_tokens"] == again["routing.prompt_tokens"]
    assert 2_500 <= cast("int", again["routing.prompt_tokens"]) <= 2_600


def test_all_candidates_are_shown(traced: Traced) -> None:
    traced.fleet(Replica("a", "10.0.0.1:8000"), Replica("b", "10.0.0.2:8000"))
    traced.pick(chat("hello", x_session_id="mine"))
    shown = cast("tuple[str, ...]", attributes(traced.route(chat("hello", x_session_id="mine")))["routing.candidates"])
    assert {line.split()[0] for line in shown} == {"a", "b"}
    assert sorted(line.split()[-1] for line in shown) == ["in_flight=0", "in_flight=1"]


def test_an_ipv6_endpoint_has_no_brackets(traced: Traced) -> None:
    traced.fleet(Replica("a", "[fd00::1]:8000"))
    shown = attributes(traced.route(GET))
    assert (shown["server.address"], shown["server.port"]) == ("fd00::1", 8000)


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (
            ResponseStart(200, True, 120, 96, 3, "10.0.0.9:8000"),
            {
                "http.response.status_code": 200,
                "gen_ai.usage.input_tokens": 120,
                "routing.cached_tokens": 96,
                "routing.prediction_error_tokens": 96,
                "routing.served_endpoint": "10.0.0.9:8000",
            },
        ),
        (ResponseStart(503, False, None, None, None, None), {"http.response.status_code": 503, "error.type": "503"}),
        (ResponseStart(404, False, None, None, None, None), {"http.response.status_code": 404}),
    ],
)
def test_the_answers_beginning(traced: Traced, start: ResponseStart, expected: Mapping[str, Any]) -> None:
    without = attributes(traced.route(GET))
    pick = traced.pick(GET)
    traced.now_s += 0.25
    pick.response_started(start)
    pick.finish()
    assert attributes(traced.spans[-1]) == {**without, **expected, "routing.response_started_s": 0.25}


def test_the_age_of_the_engines_own_figures(traced: Traced) -> None:
    traced.router.set_load("a", EngineLoad(running=0, waiting=0), traced.now_s)
    traced.now_s += 0.5
    assert attributes(traced.route(GET))["routing.load_age_s"] == 0.5


@pytest.mark.parametrize(
    ("status", "code"), [(200, StatusCode.UNSET), (429, StatusCode.UNSET), (500, StatusCode.ERROR)]
)
def test_an_answer_above_500_is_an_error(traced: Traced, status: int, code: StatusCode) -> None:
    assert traced.route(GET, ResponseStart(status, True, None, None, None, None)).status.status_code is code


def test_a_long_list_of_candidates_does_not_fill_the_span(traced: Traced) -> None:
    """Where the data plane says which replicas may be chosen, all of them are weighed."""
    fleet = [Replica(f"replica-{number}", f"10.0.0.1:{8000 + number}") for number in range(100)]
    traced.fleet(*fleet)
    pick = traced.picker.pick(chat("hello"), frozenset(replica.endpoint for replica in fleet))
    pick.finish()
    assert len(pick.decision.candidates) == 100
    assert len(cast("tuple[str, ...]", attributes(traced.spans[-1])["routing.candidates"])) == 16


def test_a_span_lasts_from_the_decisions_beginning_to_the_streams_end(traced: Traced) -> None:
    before_ns = time.time_ns()
    pick = traced.pick(GET)
    assert traced.spans == ()
    decided_ns = time.time_ns()
    while time.time_ns() == decided_ns:
        pass
    pick.finish()
    (span,) = traced.spans
    assert span.start_time is not None
    assert span.end_time is not None
    assert before_ns <= span.start_time <= decided_ns < span.end_time <= time.time_ns()


def test_a_span_begins_when_the_request_is_read(traced: Traced) -> None:
    """Not when it is decided: the slowest part may be the reading."""
    pick = traced.pick(GET)
    features = extract(GET, FeatureSettings())
    decision = replace(pick.decision)
    traced.observer.decided(GET, features, decision, took_s=2.0)
    traced.observer.finished(decision, 0.0)
    (span,) = traced.spans
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time - span.start_time >= 2_000_000_000
    assert attributes(span)["routing.decision_s"] == 2.0


def test_a_child_of_the_clients_trace(traced: Traced) -> None:
    span = traced.route(chat("hello", traceparent=SAMPLED, tracestate="vendor=1"))
    assert span.parent is not None
    assert format(span.parent.span_id, "016x") == PARENT
    assert format(span.get_span_context().trace_id, "032x") == TRACE
    assert span.get_span_context().trace_state["vendor"] == "1"


@pytest.mark.parametrize("traceparent", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{PARENT}"])
def test_what_is_no_trace_is_none(traced: Traced, traceparent: str) -> None:
    assert traced.route(chat("hello", traceparent=traceparent)).parent is None


class NeverAsked(ParentBased):
    """A sampler that follows the parent, and fails the test where it is asked to."""

    def should_sample(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("the sampler was asked")


def test_an_unsampled_trace_costs_nothing() -> None:
    """Sampler, features and decision are not even looked at."""
    spans = DecisionSpans(TracerProvider(sampler=NeverAsked(ALWAYS_ON)), "expected_work")
    nothing: Any = object()
    spans.decided(chat("hello", traceparent=UNSAMPLED), nothing, nothing, 0.0)
    spans.response_started(nothing, nothing, 0.0)
    spans.finished(nothing, 0.0)
    with pytest.raises(AssertionError, match="the sampler was asked"):
        spans.decided(chat("hello", traceparent=SAMPLED), nothing, nothing, 0.0)


def test_sampling_goes_by_the_trace_where_there_is_one() -> None:
    traced = Traced(sample_ratio=0.0)
    traced.fleet(Replica("a", "10.0.0.1:8000"))
    for request in (chat("hello"), chat("hello", traceparent=UNSAMPLED), chat("hello", traceparent="nonsense")):
        pick = traced.pick(request)
        pick.response_started(ResponseStart(200, True, 1, 1, 0, None))
        pick.finish()
    assert traced.spans == ()
    traced.route(chat("hello", traceparent=SAMPLED))
    assert len(traced.spans) == 1


def test_nothing_private_is_told(traced: Traced) -> None:
    anonymous = {
        "user": "user-4711",
        "metadata": {"conversation_id": "conversation-4711"},
        "messages": [
            {"role": "system", "content": "system-4711" * 300},
            {"role": "user", "content": "user-4711"},
        ],
        "tools": [{"type": "function", "function": {"name": "tool-4711"}}],
    }
    named = {**anonymous, "session_id": "session-4711"}
    headers = {name: "header-4711" for name in ("x-session-id", "authorization", "x-tenant-id", "cookie")}
    sources = set()
    for given, body in ((headers, named), ({}, named), ({}, anonymous)):
        span = traced.route(Request("POST", f"{CHAT}?session=4711", given, json.dumps(body).encode()))
        sources.add(attributes(span)["routing.conversation_source"])
        assert "4711" not in span.to_json()
    assert sources == {"header:x-session-id", "body:session_id", "body:metadata.conversation_id"}


def test_one_that_nobody_answered(traced: Traced) -> None:
    span = traced.route(GET)
    assert "http.response.status_code" not in attributes(span)
    assert span.end_time is not None


@pytest.mark.parametrize(
    ("settings", "replicas", "reason"),
    [
        (RouterSettings(), (), "no_replica"),
        (RouterSettings(shed=True, saturation_in_flight=0), (Replica("a", "10.0.0.1:8000"),), "shed"),
    ],
)
def test_a_refusal_is_an_error(settings: RouterSettings, replicas: tuple[Replica, ...], reason: str) -> None:
    traced = Traced(settings)
    traced.fleet(*replicas)
    for _ in replicas:
        traced.pick(GET)
    span = traced.route(GET)
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, reason)
    assert attributes(span)["routing.reason"] == attributes(span)["error.type"] == reason
    assert not attributes(span).keys() & {"server.address", "server.port", "routing.replica.id", "routing.in_flight"}


def test_each_stream_ends_its_own_span_once(traced: Traced) -> None:
    picks = [traced.pick(chat(f"number {number}", traceparent=SAMPLED)) for number in range(20)]
    for pick in reversed(picks):
        pick.finish()
        pick.finish()
        pick.response_started(ResponseStart(200, True, None, None, None, None))
    assert len(traced.spans) == 20
    assert [attributes(span)["routing.in_flight"] for span in traced.spans] == list(range(20, 0, -1))
    assert not traced.observer._open  # ids of decisions are used again


def test_the_policy_is_the_one_in_force(traced: Traced) -> None:
    traced.observer.policy = "bounded_load"
    assert attributes(traced.route(GET))["routing.policy"] == "bounded_load"
