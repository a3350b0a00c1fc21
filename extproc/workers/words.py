"""What workers and their parent say to each other: tuples of plain values (`extproc.workers.link`)."""

from __future__ import annotations

import pickle
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from extproc.core.decision import Decision, Reason
from extproc.core.features import Api, Features, FeatureSettings
from extproc.core.ladder import Rung
from extproc.core.request import Request
from extproc.picker import ResponseStart

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.server import ServerSettings
    from extproc.workers.link import Message

# By the worker; `number` is its own for the request or the stream.
QUESTION: Final = 0  # see `Question`
BY_HEADERS: Final = 1  # see `QuestionByHeaders`
STARTED: Final = 2  # number, and the fields of a ResponseStart: the answer's headers came
FINISHED: Final = 3  # number: the stream of the request ended
DISCOVERY: Final = 4  # number, bytes: an Envoy said this on an endpoint discovery stream
DISCOVERY_ENDED: Final = 5  # number
ALIVE: Final = 6  # see `Alive`: it serves; and the answer to each PING

# By the parent.
START: Final = 10  # its settings, see `start`
ANSWER: Final = 11  # see `answer`; with the number alone: by its headers it cannot be routed
ENDPOINTS: Final = 12  # number, bytes for the Envoy on that stream; None: end it
CONNECTION: Final = 13  # with a socket
READY: Final = 14  # whether the fleet is known
FEATURES: Final = 15  # see `features`
PING: Final = 16
SEND_AWAY: Final = 17  # its busiest connection: another worker has too few
LEAVE: Final = 18  # no new streams, then the end

OBSERVED_HEADERS: Final = ("traceparent", "tracestate")
"""All that an observer of decisions reads of a request's headers: spans join the trace that they name."""


class Question(NamedTuple):
    """A request that has been read. request: without its body, and with `OBSERVED_HEADERS` only.

    body_bytes: what was read of the body. reading_s: the time that it took.
    """

    number: int
    request: Request
    features: Features
    body_bytes: int
    allowed_endpoints: frozenset[str] | None
    reading_s: float


class QuestionByHeaders(NamedTuple):
    """A request whose body is not to be read, if that can be. key: of its conversation."""

    number: int
    request: Request
    key: bytes
    allowed_endpoints: frozenset[str] | None
    reading_s: float


class Alive(NamedTuple):
    """How a worker is.

    taken: connections that it was ever given. open: those that it has. busy: those of them that carry load.
    stream_errors: by kind, since it began.
    """

    taken: int
    open: int
    busy: int
    stream_errors: Mapping[str, int]


def question(
    number: int, request: Request, features: Features, allowed_endpoints: frozenset[str] | None, reading_s: float
) -> Message:
    """A request as the parent needs it; its prompt stays here."""
    system = features.rungs.index(features.system_rung) if features.system_rung is not None else None
    return (
        QUESTION,
        number,
        request.method,
        request.path,
        _observed(request),
        features.api.value,
        features.model,
        features.conversation_key,
        features.conversation_source,
        [tuple(rung) for rung in features.rungs],
        system,
        features.prompt_bytes,
        features.truncated,
        features.streamed,
        len(request.body),
        allowed_endpoints,
        reading_s,
    )


def read_question(message: Message) -> Question:
    """The other direction."""
    _, number, method, path, headers, api, model, key, source, pairs, system, prompt_bytes, cut, streamed, *rest = (
        message
    )
    body_bytes, allowed_endpoints, reading_s = rest
    rungs = tuple([Rung(*pair) for pair in pairs])
    system_rung = rungs[system] if system is not None else None
    features = Features(Api(api), model, key, source, rungs, system_rung, prompt_bytes, cut, streamed, path)
    return Question(number, Request(method, path, headers), features, body_bytes, allowed_endpoints, reading_s)


def question_by_headers(
    number: int, request: Request, key: bytes, allowed_endpoints: frozenset[str] | None, reading_s: float
) -> Message:
    length_bytes = request.content_length_bytes
    return (
        BY_HEADERS,
        number,
        request.method,
        request.path,
        _observed(request),
        length_bytes,
        key,
        allowed_endpoints,
        reading_s,
    )


def read_question_by_headers(message: Message) -> QuestionByHeaders:
    _, number, method, path, headers, length_bytes, key, allowed_endpoints, reading_s = message
    request = Request(method, path, headers, truncated=True, content_length_bytes=length_bytes)
    return QuestionByHeaders(number, request, key, allowed_endpoints, reading_s)


def _observed(request: Request) -> dict[str, str]:
    headers = request.headers
    return {name: headers[name] for name in OBSERVED_HEADERS if name in headers}


def answer(number: int, decision: Decision) -> Message:
    """As much of a decision as a reply to Envoy needs."""
    return (
        ANSWER,
        number,
        decision.reason.value,
        decision.endpoint,
        decision.membership_version,
        decision.retry_after_s,
    )


def read_answer(message: Message) -> Decision | None:
    """The decision as a worker knows it: its lease, and what was weighed, are the parent's."""
    if len(message) == 2:
        return None
    _, _, reason, endpoint, membership_version, retry_after_s = message
    return Decision(Reason(reason), None, endpoint, None, None, (), 0, 0, False, membership_version, retry_after_s)


def unanswered() -> Decision:
    """Of a router that has not seen its fleet, which is how little is known: the data plane's fallback serves."""
    return Decision(Reason.NO_REPLICA, None, None, None, None, (), 0, 0, True, 0)


def started(number: int, start: ResponseStart) -> Message:
    return (
        STARTED,
        number,
        start.status,
        start.first_token,
        start.prompt_tokens,
        start.cached_tokens,
        start.queue_depth,
        start.served_endpoint,
        start.event_stream,
    )


def read_started(message: Message) -> ResponseStart:
    return ResponseStart(*message[2:])


def alive(state: Alive) -> Message:
    return (ALIVE, *state)


def read_alive(message: Message) -> Alive:
    return Alive(*message[1:])


class Start(NamedTuple):
    """What a worker needs to know to begin."""

    server: ServerSettings
    features: FeatureSettings
    max_unread_bytes: int


def start(settings: Start) -> Message:
    return (START, pickle.dumps(settings.server), _given(settings.features), settings.max_unread_bytes)


def read_start(message: Message) -> Start:
    _, server, given, max_unread_bytes = message
    return Start(pickle.loads(server), FeatureSettings(**given), max_unread_bytes)


def features(settings: FeatureSettings) -> Message:
    return (FEATURES, _given(settings))


def read_features(message: Message) -> FeatureSettings:
    return FeatureSettings(**message[1])


def _given(settings: FeatureSettings) -> dict[str, Any]:
    """Without what they make of it themselves."""
    return {each.name: getattr(settings, each.name) for each in fields(settings) if each.init}
