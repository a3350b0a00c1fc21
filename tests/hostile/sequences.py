"""Sequences of ext_proc messages as no Envoy would send them, for hypothesis."""

from __future__ import annotations

import json
from typing import Any

from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
)
from hypothesis import strategies as st

from extproc.messages import BodyMode

CHAT = {"model": "m", "session_id": "s", "messages": [{"role": "user", "content": "hello " * 200}]}

_header_names = st.sampled_from(
    [
        ":method",
        ":path",
        ":status",
        "content-length",
        "content-type",
        "X_Session-ID",
        "x-session-id",
        "x-tenant-id",
        "traceparent",
        "x-prompt-tokens",
        "x-cached-tokens",
        "x-queue-depth",
        "",
    ]
) | st.text(max_size=20)
_header_values = st.sampled_from(
    [
        b"POST",
        b"GET",
        b"/v1/chat/completions",
        b"/v1/responses",
        b"200",
        b"0",
        b"-1",
        b"9" * 30,
        b"text/event-stream",
        b"a\r\nx-evil: 1",
        b"\x00",
        b"\xff\xfe",
        b"s" * 100_000,
        b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01",
    ]
) | st.binary(max_size=40)
chunks = st.sampled_from(
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        json.dumps(CHAT).encode(),
        json.dumps(CHAT).encode()[:300],
        b"[" * 50_000,
        b'{"a":' * 2_000,
        b'{"messages": [{"role": 3, "content": {"x": [null]}}], "model": ["m"], "stream": 1e999}',
        b'{"messages": 7, "tools": "x", "prompt": [[1, -1], "\\ud800"]}',
        b"\xff" * 70_000,
        b"\x1f\x8b\x08" + bytes(100),
    ]
) | st.binary(max_size=64)
_modes = st.sampled_from([mode.value for mode in BodyMode] + [6, 77])
_UNKNOWN_FIELDS = b"\xfa\xff\x0f\x05hello" + b"\xc0\x3e\x01"
"""A text in field 32,767 and a number in field 1,000: what a later version of the protocol may hold."""


@st.composite
def _headers(draw: st.DrawFn, field: str) -> ProcessingRequest:
    message = ProcessingRequest(**{field: HttpHeaders(end_of_stream=draw(st.booleans()))})
    for key, value in draw(st.lists(st.tuples(_header_names, _header_values), max_size=8)):
        getattr(message, field).headers.headers.add(key=key, raw_value=value)
    if draw(st.booleans()):
        message.protocol_config.request_body_mode = draw(_modes)
        message.protocol_config.response_body_mode = draw(_modes)
    hint: Any = draw(st.none() | st.sampled_from(["", "10.0.0.1:8000", "127.0.0.1:22,", ["10.0.0.2:8000"], [1], 7, {}]))
    if hint is not None:
        namespace = {"x-gateway-destination-endpoint-subset": hint, "x-gateway-destination-endpoint-served": hint}
        message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(namespace)
        message.metadata_context.filter_metadata["envoy.lb"].update(namespace)
    return message


@st.composite
def _body(draw: st.DrawFn, field: str) -> ProcessingRequest:
    return ProcessingRequest(**{field: HttpBody(body=draw(chunks), end_of_stream=draw(st.booleans()))})


_messages = st.one_of(
    _headers("request_headers"),
    _body("request_body"),
    st.just(ProcessingRequest(request_trailers=HttpTrailers())),
    _headers("response_headers"),
    _body("response_body"),
    st.just(ProcessingRequest(response_trailers=HttpTrailers())),
)

well_formed = st.tuples(_messages, st.sampled_from([b"", _UNKNOWN_FIELDS])).map(
    lambda pair: pair[0].SerializeToString() + pair[1]
)
"""A message of a known kind, with fields of a later version now and then."""

malformed = st.one_of(
    st.just(b""),  # of no kind at all
    st.just(_UNKNOWN_FIELDS),
    st.binary(max_size=50),
    well_formed.map(lambda message: message[: len(message) // 2]),
)
