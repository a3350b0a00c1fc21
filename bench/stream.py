"""What one ext_proc stream costs the router: `python -m bench.stream [--bodies 1000,16000]`.

Bytes as Envoy sends them, headers, body, the answer's headers and the end, go through a connection, the exchange, the
core and the observers that the defaults have, and come out as bytes: all of a request but the event loop and the
kernel. The best of several rounds counts, since everything else that runs here only adds. `unread`: of later turns of a
session that is known, whose body Envoy keeps.
"""

from __future__ import annotations

import argparse
from collections import Counter
from itertools import islice
from statistics import median
from time import perf_counter_ns
from typing import TYPE_CHECKING, Final

from envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody, HttpHeaders, ProcessingRequest
from hpack import Encoder

from bench.core import chat
from extproc.admin.decisions import RecentDecisions
from extproc.admin.history import History
from extproc.core.replica import Replica
from extproc.core.router import Router
from extproc.core.settings import FeatureSettings
from extproc.eds import EndpointDiscovery
from extproc.http2 import frames
from extproc.http2.connection import Connection
from extproc.observers import Observers
from extproc.picker import EndpointPicker
from extproc.services import EXTERNAL_PROCESSOR, Health, services

if TYPE_CHECKING:
    from collections.abc import Iterator

REPLICAS: Final = 4
STREAMS: Final = 500
SESSIONS: Final = 100
ROUNDS: Final = 5
BUFFERED: Final = 2
CALL: Final = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", f"/{EXTERNAL_PROCESSOR}/Process"),
    (":authority", "extproc"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
    ("x-envoy-internal", "true"),
    ("x-forwarded-for", "127.0.0.1"),
]
REQUEST: Final = {
    ":authority": "127.0.0.1:10000",
    ":path": "/v1/chat/completions",
    ":method": "POST",
    ":scheme": "http",
    "content-type": "application/json",
    "user-agent": "bench",
    "x-forwarded-for": "127.0.0.1",
    "x-forwarded-proto": "http",
    "x-request-id": "0a1b2c3d-0000-4000-8000-0a1b2c3d4e5f",
}
ANSWER: Final = {":status": "200", "content-type": "application/json", "content-length": "240", "server": "uvicorn"}


def messages(number: int, body: bytes, unread: bool) -> Iterator[bytes]:
    """What Envoy says of one request."""
    opening = ProcessingRequest()
    opening.protocol_config.request_body_mode = BUFFERED
    mine = {"x-session-id": f"user-{number}", "content-length": str(len(body))}
    _set_headers(opening.request_headers, REQUEST | mine)
    yield opening.SerializeToString()
    if not unread:
        yield ProcessingRequest(request_body=HttpBody(body=body, end_of_stream=True)).SerializeToString()
    answer = ProcessingRequest()
    _set_headers(answer.response_headers, ANSWER)
    yield answer.SerializeToString()


def _set_headers(message: HttpHeaders, headers: dict[str, str]) -> None:
    for key, value in headers.items():
        message.headers.headers.add(key=key, raw_value=value.encode())


def stream(encoder: Encoder, number: int, body: bytes, unread: bool = False) -> list[bytes]:
    """The bytes of one stream, as they would come: one piece before each answer."""
    stream_id = 2 * number + 1
    pieces = [frames.frame(frames.HEADERS, frames.END_HEADERS, stream_id, encoder.encode(CALL))]
    for message in messages(number % SESSIONS, body, unread):
        data = b"\0" + len(message).to_bytes(4, "big") + message
        size = frames.DEFAULT_FRAME_BYTES
        pieces.append(
            b"".join(frames.frame(frames.DATA, 0, stream_id, data[at : at + size]) for at in range(0, len(data), size))
        )
    pieces[:2] = [pieces[0] + pieces[1]]
    pieces.append(frames.frame(frames.DATA, frames.END_STREAM, stream_id))
    return pieces


def cost_us(body_bytes: int, unread: bool = False) -> float:
    """Median of a stream, of the best round."""
    bodies = [chat(number, body_bytes, stream=False).body for number in range(20)]
    return min(median(_round(bodies, unread)) for _ in range(ROUNDS)) / 1e3


def _round(bodies: list[bytes], unread: bool) -> list[int]:
    router = Router()
    router.set_members([Replica(str(n), f"127.0.0.1:{9000 + n}") for n in range(REPLICAS)], 0.0)
    picker = EndpointPicker(router, max_unread_bytes=max(map(len, bodies)) if unread else 0)
    picker.observer = Observers(RecentDecisions(router, 1000), History(router))
    served = services(picker, EndpointDiscovery(), Health(), Counter())
    connection = Connection(served, 16 << 20, lambda: None)
    connection.receive(frames.PREFACE + frames.settings({}) + frames.window_update(0, 1 << 28))
    encoder = Encoder()
    streams = [
        stream(encoder, number, bodies[number % len(bodies)], unread and number >= SESSIONS)
        for number in range(STREAMS)
    ]
    durations_ns = []
    for pieces in streams:
        began_ns = perf_counter_ns()
        for piece in pieces:
            connection.receive(piece)
            connection.take_output()
        durations_ns.append(perf_counter_ns() - began_ns)
    assert router.open_leases == 0 and not connection.failed
    assert not unread or len(picker.known) == SESSIONS
    return list(islice(durations_ns, SESSIONS, None))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.stream", description=__doc__)
    parser.add_argument("--bodies", default="1000,16000,220000,1000000", help="lengths in bytes")
    for body_bytes in map(int, parser.parse_args().bodies.split(",")):
        unread = body_bytes >= FeatureSettings().unread_from_bytes
        later = f", unread {cost_us(body_bytes, unread=True):9.1f} us" if unread else ""
        print(f"{body_bytes:9} bytes {cost_us(body_bytes):9.1f} us{later}")


if __name__ == "__main__":
    main()
