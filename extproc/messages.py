"""The words of one ext_proc stream: what the data plane says (events) and what is answered (replies).

Plain values, so that the exchange can be read and tested without protobuf or a transport; `extproc.wire`
turns them into bytes and back. Those that each request makes anew are not frozen: that would double what making them
costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

READ_HEADERS: Final = (
    *(":method", ":path", "content-length", "traceparent", "tracestate"),
    *(":status", "content-type", "x-prompt-tokens", "x-cached-tokens", "x-queue-depth"),
)
"""All that is ever looked at, of requests and of answers, beside what the configuration names. Others need not be sent;
who reads another puts it here."""


class BodyMode(Enum):
    """How the data plane sends bodies (`ProcessingMode.BodySendMode`, same numbers)."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4
    GRPC = 5


class Phase(Enum):
    """The message that a reply answers; the value is its field in ProcessingResponse."""

    REQUEST_HEADERS = "request_headers"
    REQUEST_BODY = "request_body"
    REQUEST_TRAILERS = "request_trailers"
    RESPONSE_HEADERS = "response_headers"
    RESPONSE_BODY = "response_body"
    RESPONSE_TRAILERS = "response_trailers"


@dataclass(slots=True)
class RequestHeaders:
    """The first message of a stream.

    headers: names in lower case, pseudo headers (":method", ":path") included; of a repeated header the last.
    end_of_stream: no body follows.
    allowed_endpoints: the data plane's subset hint, "ip:port" each; None where there is no hint.
    """

    headers: Mapping[str, str]
    end_of_stream: bool
    request_body_mode: BodyMode = BodyMode.NONE
    response_body_mode: BodyMode = BodyMode.NONE
    allowed_endpoints: frozenset[str] | None = None


@dataclass(slots=True)
class RequestBody:
    """The body, or a piece of it in the streamed modes."""

    chunk: bytes
    end_of_stream: bool


@dataclass(frozen=True, slots=True)
class RequestTrailers:
    """The request ended with trailers."""


@dataclass(slots=True)
class ResponseHeaders:
    """The upstream (or the data plane itself) began to answer.

    served_endpoint: "ip:port" that the data plane says it used, retries included; None where it does not say.
    """

    headers: Mapping[str, str]
    end_of_stream: bool = False
    served_endpoint: str | None = None


@dataclass(slots=True)
class ResponseBody:
    """A piece of the answer."""

    chunk: bytes
    end_of_stream: bool


@dataclass(frozen=True, slots=True)
class ResponseTrailers:
    """The answer ended with trailers."""


Event = RequestHeaders | RequestBody | RequestTrailers | ResponseHeaders | ResponseBody | ResponseTrailers


@dataclass(frozen=True, slots=True)
class Continue:
    """Go on, nothing changed."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class Route:
    """Go on, to exactly this endpoint ("ip:port"). without_body: in answer to headers only: don't send the body."""

    phase: Phase
    endpoint: str
    without_body: bool = False


@dataclass(frozen=True, slots=True)
class Echo:
    """Give a streamed piece of a body back as it came (full duplex: what is not sent back is lost)."""

    phase: Phase
    chunk: bytes
    end_of_stream: bool


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer the client from here.

    code: a word for programs; message: a sentence for people. retry_after_s: a hint to the client, if any.
    """

    status: int
    code: str
    message: str
    retry_after_s: float | None = None


Reply = Continue | Route | Echo | Refuse
