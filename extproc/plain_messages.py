"""The messages of nearly every request, read without protobuf's reader: it makes an object of each field that is looked
at, which costs more than all else that is done with a short request.

Headers and bodies as data planes write them are understood here; whatever looks otherwise is left to `extproc.wire`.
The encoding: protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from envoy.config.core.v3.base_pb2 import Metadata
from envoy.service.ext_proc.v3.external_processor_pb2 import ProtocolConfiguration
from google.protobuf.message import DecodeError

from extproc.messages import BodyMode, Event, RequestBody, RequestHeaders, ResponseBody, ResponseHeaders

if TYPE_CHECKING:
    from collections.abc import Mapping

SERVED = "x-gateway-destination-endpoint-served"
"""Metadata key by which the data plane says which endpoint answered."""
SUBSET = "x-gateway-destination-endpoint-subset"
"""Metadata key of the subset hint."""
METADATA_NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"

# A field's number and kind in one byte, of ProcessingRequest ...
_REQUEST_HEADERS: Final = 0x12
_RESPONSE_HEADERS: Final = 0x1A
_REQUEST_BODY: Final = 0x22
_RESPONSE_BODY: Final = 0x2A
_METADATA_CONTEXT: Final = 0x42
_NO_METADATA: Final = b"\x42\x00"  # Envoy has none to forward before it has picked
_PROTOCOL_CONFIG: Final = 0x5A
# ... and of what is in it.
_HEADER_MAP: Final = 0x0A  # of HttpHeaders
_HEADERS_END_OF_STREAM: Final = 0x18
_HEADER: Final = 0x0A  # of HeaderMap
_KEY: Final = 0x0A  # of HeaderValue
_VALUE: Final = 0x12
_RAW_VALUE: Final = 0x1A
_BODY: Final = 0x0A  # of HttpBody
_BODY_END_OF_STREAM: Final = 0x10

_BODY_MODES = {mode.value: mode for mode in BodyMode}


class Unusual(Exception):
    """Not one of the shapes that are known here."""


def read(message: bytes) -> Event | None:
    """One ProcessingRequest; None where protobuf's own reader has to say what it is, and whether it is one."""
    try:
        return _read(message)
    except (Unusual, IndexError, UnicodeDecodeError, DecodeError):
        return None


def _read(message: bytes) -> Event | None:
    kind, size = message[0], len(message)
    start, stop = _bounds(message, 1, size)
    if kind in (_REQUEST_BODY, _RESPONSE_BODY):
        if stop != size and message[stop:] != _NO_METADATA:
            return None
        chunk, end_of_stream = _body(message, start, stop)
        return RequestBody(chunk, end_of_stream) if kind == _REQUEST_BODY else ResponseBody(chunk, end_of_stream)
    if kind not in (_REQUEST_HEADERS, _RESPONSE_HEADERS):
        return None
    metadata = modes = b""
    at = stop
    while at < size:
        tag = message[at]
        begin, end = _bounds(message, at + 1, size)
        if tag == _METADATA_CONTEXT and not metadata:
            metadata = message[begin:end]
        elif tag == _PROTOCOL_CONFIG and not modes:
            modes = message[begin:end]
        else:
            return None
        at = end
    end_of_stream = False
    if message[start : start + 1] == b"\x0a":
        begin, end = _bounds(message, start + 1, stop)
        headers = _headers(message, begin, end)
        start = end
    else:
        headers = {}
    if start < stop:
        end_of_stream = _flag(message, start, stop, _HEADERS_END_OF_STREAM)
    subset, served = said_by_metadata(metadata) if metadata else (None, None)
    if kind == _RESPONSE_HEADERS:
        if modes:
            return None  # it stands in the first message only
        return ResponseHeaders(headers, end_of_stream, served)
    request_body_mode, response_body_mode = body_modes(modes)
    return RequestHeaders(headers, end_of_stream, request_body_mode, response_body_mode, subset)


def _bounds(message: bytes, at: int, limit: int) -> tuple[int, int]:
    """Of what a length at `at` announces: where it begins and ends."""
    length = message[at]
    at += 1
    if length >= 0x80:
        length &= 0x7F
        shift = 7
        while True:
            byte = message[at]
            at += 1
            length |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift > 28:
                raise Unusual
    if at + length > limit:
        raise Unusual
    return at, at + length


def _flag(message: bytes, at: int, stop: int, tag: int) -> bool:
    """The last field, if it is the one expected."""
    if stop - at != 2 or message[at] != tag or message[at + 1] > 1:
        raise Unusual
    return message[at + 1] == 1


def _body(message: bytes, start: int, stop: int) -> tuple[bytes, bool]:
    chunk = b""
    if start < stop and message[start] == _BODY:
        begin, start = _bounds(message, start + 1, stop)
        chunk = message[begin:start]
    return chunk, start < stop and _flag(message, start, stop, _BODY_END_OF_STREAM)


def _headers(message: bytes, at: int, stop: int) -> dict[str, str]:
    headers: dict[str, str] = {}
    while at < stop:
        if message[at] != _HEADER:
            raise Unusual
        at, end = _bounds(message, at + 1, stop)
        name, value = "", ""
        if at < end and message[at] == _KEY:
            begin, at = _bounds(message, at + 1, end)
            name = header_name(message[begin:at])
        if at < end and message[at] == _VALUE:
            begin, at = _bounds(message, at + 1, end)
            value = message[begin:at].decode("utf-8")
        if at < end and message[at] == _RAW_VALUE:
            begin, at = _bounds(message, at + 1, end)
            value = header_value(message[begin:at]) or value
        if at != end:
            raise Unusual
        headers[name] = value
    return headers


@lru_cache(maxsize=1024)
def header_name(name: bytes) -> str:
    """In lower case. Raises UnicodeDecodeError."""
    return name.decode("utf-8").lower()


def header_value(value: bytes) -> str:
    """Bytes that are not UTF-8 are spelled out (\\xff), since features hash them: two ids must stay different."""
    return value.decode("utf-8", "backslashreplace")


@lru_cache(maxsize=64)
def body_modes(config: bytes) -> tuple[BodyMode, BodyMode]:
    """A ProtocolConfiguration: how bodies of the request and of the answer come. Raises DecodeError."""
    modes = ProtocolConfiguration.FromString(config)
    return (
        _BODY_MODES.get(modes.request_body_mode, BodyMode.NONE),
        _BODY_MODES.get(modes.response_body_mode, BodyMode.NONE),
    )


@lru_cache(maxsize=4096)  # a fleet of 1,024 says as many different things, some of them twice
def said_by_metadata(metadata: bytes) -> tuple[frozenset[str] | None, str | None]:
    """A Metadata: the subset hint, and the endpoint that served. Raises DecodeError."""
    namespaces: Mapping[str, Any] = Metadata.FromString(metadata).filter_metadata
    return _subset(namespaces.get(SUBSET_NAMESPACE)), _served(namespaces.get(METADATA_NAMESPACE))


def _subset(hint: Any) -> frozenset[str] | None:
    if hint is None or SUBSET not in hint.fields:
        return None
    value = hint.fields[SUBSET]
    listed = (
        [item.string_value for item in value.list_value.values]
        if value.HasField("list_value")
        else value.string_value.split(",")
    )
    return frozenset([endpoint.strip() for endpoint in listed if endpoint.strip()])


def _served(metadata: Any) -> str | None:
    if metadata is None or SERVED not in metadata.fields:
        return None
    return metadata.fields[SERVED].string_value or None
