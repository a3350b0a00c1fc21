"""ext_proc messages as bytes: `decode` reads what Envoy says, `encode` writes what is answered.

Source of the formats: envoy/service/ext_proc/v3/external_processor.proto and, for the names of the header and
the metadata keys, the endpoint picker protocol of the Gateway API Inference Extension (proposal 004, v1.0.0).
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyMutation,
    CommonResponse,
    HeaderMutation,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
)

from extproc import plain_messages
from extproc.messages import (
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
from extproc.plain_messages import METADATA_NAMESPACE, body_modes, header_value, said_by_metadata

if TYPE_CHECKING:
    from collections.abc import Iterable

DESTINATION = "x-gateway-destination-endpoint"
"""The routing header, and the key of the same value in dynamic metadata."""
MAX_ECHO_BYTES = 62_000
"""Largest piece of a streamed body reply; the endpoint picker protocol keeps below 64 KB with its envelope."""

WITHOUT_BODY = ProcessingMode(
    request_body_mode=ProcessingMode.NONE,
    response_header_mode=ProcessingMode.SEND,
    response_trailer_mode=ProcessingMode.SEND,
)
"""How the data plane is to go on with a request whose body is not needed. It takes the place of all that is configured
(envoy/bootstrap.yaml), so what is to stay is said again."""

_HEADER_PHASES = frozenset({Phase.REQUEST_HEADERS, Phase.RESPONSE_HEADERS})
_BODY_PHASES = frozenset({Phase.REQUEST_BODY, Phase.RESPONSE_BODY})


class UnknownMessage(ValueError):
    """A ProcessingRequest whose kind this version does not know, or bytes that are none."""


def decode(message: bytes) -> Event:
    """One ProcessingRequest. Raises UnknownMessage."""
    event = plain_messages.read(message)
    return event if event is not None else decode_any(message)


def decode_any(message: bytes) -> Event:
    """The same by protobuf's own reader, for messages of any shape."""
    try:
        parsed = ProcessingRequest.FromString(message)
    except Exception as error:
        raise UnknownMessage("not a ProcessingRequest") from error
    subset, served = said_by_metadata(parsed.metadata_context.SerializeToString())
    match parsed.WhichOneof("request"):
        case "request_headers":
            http = parsed.request_headers
            modes = body_modes(parsed.protocol_config.SerializeToString())
            return RequestHeaders(_headers(http.headers.headers), http.end_of_stream, *modes, subset)
        case "request_body":
            return RequestBody(parsed.request_body.body, parsed.request_body.end_of_stream)
        case "response_headers":
            http = parsed.response_headers
            return ResponseHeaders(_headers(http.headers.headers), http.end_of_stream, served)
        case "response_body":
            return ResponseBody(parsed.response_body.body, parsed.response_body.end_of_stream)
        case "request_trailers":
            return RequestTrailers()
        case "response_trailers":
            return ResponseTrailers()
    raise UnknownMessage("a ProcessingRequest of an unknown kind")


def encode(reply: Reply) -> Iterable[bytes]:
    """The ProcessingResponses of one reply: one, or of a long echo several.

    Raises ValueError where a value would break out of its header.
    """
    match reply:
        case Continue() | Route():
            return (_steady(reply),)
        case Echo():
            return _echo(reply)
        case Refuse():
            return (_refuse(reply),)


@lru_cache(maxsize=8192)  # replies depend on the endpoint alone: a fleet of 1,024 fills 3 of the phases
def _steady(reply: Continue | Route) -> bytes:
    phase = reply.phase
    response = ProcessingResponse()
    common = CommonResponse()
    if isinstance(reply, Route):
        endpoint = _header_value(reply.endpoint)
        response.dynamic_metadata.update({METADATA_NAMESPACE: {DESTINATION: reply.endpoint}})
        common.header_mutation.set_headers.append(_overwrite(DESTINATION, endpoint))
        if reply.without_body:
            response.mode_override.CopyFrom(WITHOUT_BODY)
    part = getattr(response, phase.value)
    part.SetInParent()
    if phase in _HEADER_PHASES or phase in _BODY_PHASES:
        part.response.CopyFrom(common)
    return _bytes(response)


def _echo(reply: Echo) -> list[bytes]:
    pieces = [reply.chunk[at : at + MAX_ECHO_BYTES] for at in range(0, len(reply.chunk), MAX_ECHO_BYTES)] or [b""]
    last = len(pieces) - 1
    messages = []
    for number, piece in enumerate(pieces):
        streamed = StreamedBodyResponse(body=piece, end_of_stream=reply.end_of_stream and number == last)
        response = ProcessingResponse()
        getattr(response, reply.phase.value).response.CopyFrom(
            CommonResponse(body_mutation=BodyMutation(streamed_response=streamed))
        )
        messages.append(_bytes(response))
    return messages


def _refuse(reply: Refuse) -> bytes:
    """An error in the shape that OpenAI's clients read (platform.openai.com/docs/guides/error-codes)."""
    kind = "rate_limit_error" if reply.status == 429 else "server_error"
    error = {"message": reply.message, "type": kind, "param": None, "code": reply.code}
    mutation = HeaderMutation(set_headers=[_overwrite("content-type", b"application/json")])
    if reply.retry_after_s is not None:
        # Whole seconds (RFC 9110, 10.2.3), never 0: a client that comes back at once adds to the overload.
        mutation.set_headers.append(_overwrite("retry-after", b"%d" % max(1, math.ceil(reply.retry_after_s))))
    immediate = ImmediateResponse(headers=mutation, body=json.dumps({"error": error}).encode(), details=reply.code)
    immediate.status.code = reply.status
    return _bytes(ProcessingResponse(immediate_response=immediate))


def _overwrite(name: str, value: bytes) -> HeaderValueOption:
    return HeaderValueOption(
        header=HeaderValue(key=name, raw_value=value),
        append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def _header_value(value: str) -> bytes:
    """A value fit for a header. Raises ValueError on CR, LF, NUL and on what is not ASCII."""
    if any(character in value for character in "\r\n\0"):
        raise ValueError(f"a header value must not hold CR, LF or NUL: {value!r}")
    return value.encode("ascii")


def _bytes(message: ProcessingResponse) -> bytes:
    serialized: bytes = message.SerializeToString()
    return serialized


def _headers(values: Iterable[Any]) -> dict[str, str]:
    # Envoy fills raw_value, other data planes the older `value`.
    return {header.key.lower(): header_value(header.raw_value) or header.value for header in values}
