"""One ext_proc stream: events in, replies out. Knows no transport, no protobuf, no clock.

Theory of operation
-------------------
Envoy opens one stream per HTTP request and sends what it has been configured to send, in the order in which it
happens. A request is routed once, at the first moment when all of its prompt that will ever be seen has been
seen. When that is depends on how the data plane sends bodies, which the first message says:

    body mode              the request is routed by ...          before that              after that
    (headers only)         the headers                           -                        -
    NONE, STREAMED, GRPC   the headers: the data plane does      -                        continue each piece
                           not wait with them for a body
    BUFFERED               the one body message, or the headers  continue the headers     continue
    BUFFERED_PARTIAL       the same, the body maybe cut off      continue the headers     continue
    FULL_DUPLEX_STREAMED   the end of the body, or the piece     hold the header reply    echo each piece
                           that fills the head                   and the pieces

Headers say enough for a long body of a session that is known (extproc.core.known). The data plane is told then that it
need not send the body; where it may not be told such things, it sends it all the same.

The route travels in the reply that lets the headers go, as a header and as dynamic metadata alike.

    state      request headers     request body        request trailers    response *
    START      route, or > BODY    route               route               go on
    BODY       go on               route, or collect   route               go on
    ROUTED     go on               go on               go on               go on
    REFUSED    nothing             nothing             nothing             nothing

"Go on" answers every message with its own kind, since a wrong kind ends the stream and none at all stalls the
request; only in full duplex, what comes after the end of a body is ignored (envoyproxy/envoy#46237).

The decision's lease is held until `close`, which the transport calls at every end of the stream.

Response headers tell that the prefill is over, unless they open an event stream of an engine that sends its
headers before its first token. One behind the first-token middleware holds them, and marks them by its queue depth.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from extproc.core.decision import Reason
from extproc.core.request import Request
from extproc.messages import (
    BodyMode,
    Continue,
    Echo,
    Event,
    Phase,
    Refuse,
    Reply,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    Route,
)
from extproc.picker import ResponseStart

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.core.decision import Decision
    from extproc.picker import Picker, RoutedRequest

MAX_HEAD_BYTES: Final = 8 * 1024 * 1024
"""Held of a full duplex body before it is routed by its head: what Envoy's own configuration buffers at most."""

PROMPT_TOKENS: Final = "x-prompt-tokens"
CACHED_TOKENS: Final = "x-cached-tokens"
QUEUE_DEPTH: Final = "x-queue-depth"
MAX_PLAUSIBLE_TOKENS: Final = 100_000_000

_ONE_BODY_MESSAGE = frozenset({BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL})
_NO_HEADERS = RequestHeaders(headers={}, end_of_stream=False, request_body_mode=BodyMode.BUFFERED)


class State(Enum):
    """What the exchange waits for."""

    START = auto()
    BODY = auto()
    ROUTED = auto()
    REFUSED = auto()


class Exchange:
    """The state of one stream.

    trace_context: the headers of the trace that the data plane is in (W3C: `traceparent`, `tracestate`). They take the
        place of the request's own, which the client wrote before the data plane had begun its span.
    """

    def __init__(
        self,
        picker: Picker,
        max_head_bytes: int = MAX_HEAD_BYTES,
        trace_context: Mapping[str, str] | None = None,
    ) -> None:
        self._picker = picker
        self._trace_context = trace_context
        self._max_head_bytes = max_head_bytes
        self._state = State.START
        self._opening = _NO_HEADERS  # stays where the data plane skips the headers
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._request_ended = False
        self._response_ended = False
        self._pick: RoutedRequest | None = None

    def receive(self, event: Event) -> list[Reply]:
        """Everything to be answered to one message, in order."""
        if self._state is State.REFUSED:
            return []
        match event:
            case RequestHeaders():
                replies = self._request_headers(event)
            case RequestBody():
                replies = self._request_body(event)
            case RequestTrailers():
                replies = self._request_trailers()
            case ResponseHeaders():
                replies = self._response_headers(event)
            case ResponseBody():
                replies = self._response_body(event)
            case ResponseTrailers():
                replies = [Continue(Phase.RESPONSE_TRAILERS)]
        return replies

    def close(self) -> None:
        """The stream is over, whichever way. Idempotent."""
        if self._pick is not None:
            self._pick.finish()

    # --- the request ---

    def _request_headers(self, opening: RequestHeaders) -> list[Reply]:
        if self._state is not State.START:
            return [Continue(Phase.REQUEST_HEADERS)]
        self._opening = opening
        mode = opening.request_body_mode
        if opening.end_of_stream:
            self._request_ended = True
            return [self._route(Phase.REQUEST_HEADERS, b"", truncated=False)]
        if mode in _ONE_BODY_MESSAGE:
            routed = self._picker.pick_by_headers(self._request(b"", truncated=True), opening.allowed_endpoints)
            if routed is not None:
                return [self._answer(routed, Phase.REQUEST_HEADERS, without_body=True)]
            self._state = State.BODY
            return [Continue(Phase.REQUEST_HEADERS)]
        if mode is BodyMode.FULL_DUPLEX_STREAMED:
            self._state = State.BODY
            return []
        return [self._route(Phase.REQUEST_HEADERS, b"", truncated=True)]

    def _request_body(self, body: RequestBody) -> list[Reply]:
        full_duplex = self._opening.request_body_mode is BodyMode.FULL_DUPLEX_STREAMED
        if self._state is State.ROUTED:
            if not full_duplex:
                return [Continue(Phase.REQUEST_BODY)]
            if self._request_ended:
                return []
            self._request_ended = body.end_of_stream
            return [Echo(Phase.REQUEST_BODY, body.chunk, body.end_of_stream)]
        if not full_duplex:
            return [self._route(Phase.REQUEST_BODY, body.chunk, self._is_cut_off(body))]
        self._held.append(body.chunk)
        self._held_bytes += len(body.chunk)
        self._request_ended = body.end_of_stream
        if body.end_of_stream or self._held_bytes >= self._max_head_bytes:
            return self._release(truncated=not body.end_of_stream, end_of_stream=body.end_of_stream)
        return []

    def _request_trailers(self) -> list[Reply]:
        self._request_ended = True
        if self._state is State.ROUTED:
            return [Continue(Phase.REQUEST_TRAILERS)]
        if self._opening.request_body_mode is not BodyMode.FULL_DUPLEX_STREAMED:
            return [self._route(Phase.REQUEST_TRAILERS, b"", truncated=False)]
        replies = self._release(truncated=False, end_of_stream=False)
        return replies if self._state is State.REFUSED else [*replies, Continue(Phase.REQUEST_TRAILERS)]

    def _release(self, *, truncated: bool, end_of_stream: bool) -> list[Reply]:
        """Route a held full duplex request and give its body back."""
        body = b"".join(self._held)
        self._held.clear()
        reply = self._route(Phase.REQUEST_HEADERS, body, truncated)
        if isinstance(reply, Refuse) or (not body and not end_of_stream):
            return [reply]
        return [reply, Echo(Phase.REQUEST_BODY, body, end_of_stream)]

    def _is_cut_off(self, body: RequestBody) -> bool:
        """Whether a partial body misses its end. One that trailers follow lacks the flag but nothing else."""
        if body.end_of_stream or self._opening.request_body_mode is not BodyMode.BUFFERED_PARTIAL:
            return False
        return self._content_length_bytes() != len(body.chunk)

    def _content_length_bytes(self) -> int | None:
        return _count(self._opening.headers.get("content-length"), at_most=1 << 50)

    def _route(self, phase: Phase, body: bytes, truncated: bool) -> Reply:
        routed = self._picker.pick(self._request(body, truncated), self._opening.allowed_endpoints)
        return self._answer(routed, phase)

    def _request(self, body: bytes, truncated: bool) -> Request:
        headers = self._opening.headers
        if self._trace_context:
            headers = {**headers, **self._trace_context}
        return Request(
            method=headers.get(":method", "POST"),
            path=headers.get(":path", ""),
            headers=headers,
            body=body,
            truncated=truncated,
            content_length_bytes=self._content_length_bytes(),
        )

    def _answer(self, routed: RoutedRequest, phase: Phase, without_body: bool = False) -> Reply:
        self._pick = routed
        self._state = State.ROUTED
        decision = routed.decision
        if decision.endpoint is not None:
            return Route(phase, decision.endpoint, without_body)
        if decision.membership_version == 0:
            # A router that has not seen its fleet yet knows less than the data plane, which may hold the
            # endpoints of a router before it: stay silent, so that its fallback serves.
            return Continue(phase)
        self._state = State.REFUSED
        return _refusal(decision)

    # --- the response ---

    def _response_headers(self, answer: ResponseHeaders) -> list[Reply]:
        self._response_ended = answer.end_of_stream
        if self._pick is not None:
            self._pick.response_started(_response_start(answer))
        return [Continue(Phase.RESPONSE_HEADERS)]

    def _response_body(self, body: ResponseBody) -> list[Reply]:
        if self._opening.response_body_mode is not BodyMode.FULL_DUPLEX_STREAMED:
            return [Continue(Phase.RESPONSE_BODY)]
        if self._response_ended:
            return []
        self._response_ended = body.end_of_stream
        return [Echo(Phase.RESPONSE_BODY, body.chunk, body.end_of_stream)]


def _refusal(decision: Decision) -> Refuse:
    if decision.reason is Reason.SHED:
        message = "every replica is at its limit; try again later"
        return Refuse(429, "rate_limit_exceeded", message, decision.retry_after_s)
    return Refuse(503, "no_replica", "no replica can serve this request")


def _response_start(answer: ResponseHeaders) -> ResponseStart:
    headers = answer.headers
    status = _count(headers.get(":status"), at_most=999) or 0
    event_stream = headers.get("content-type", "").startswith("text/event-stream")
    return ResponseStart(
        status=status,
        first_token=200 <= status < 300 and (QUEUE_DEPTH in headers or not event_stream),
        prompt_tokens=_count(headers.get(PROMPT_TOKENS)),
        cached_tokens=_count(headers.get(CACHED_TOKENS)),
        queue_depth=_count(headers.get(QUEUE_DEPTH)),
        served_endpoint=answer.served_endpoint,
        event_stream=event_stream,
    )


def _count(text: str | None, at_most: int = MAX_PLAUSIBLE_TOKENS) -> int | None:
    """A count that a peer wrote into a header; None where it is none, or not a plausible one."""
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= 18):
        return None
    value = int(text)
    return value if value <= at_most else None
