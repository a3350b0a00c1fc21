"""The services on grpcio: gRPC's own implementation, for comparison and for those who want no other.

asyncio rather than threads: a stream stays open for a whole generation, and a synchronous gRPC server would pin a
thread to each of them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

from extproc.call import OK

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from extproc.call import Call, Service

_RpcContext = grpc.aio.ServicerContext[bytes, bytes]


class Answers:
    """What a call answers, until it has been written."""

    def __init__(self) -> None:
        self.status = OK
        self.message = ""
        self._ended = False
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()

    def send(self, message: bytes) -> None:
        if not self._ended:
            self._queue.put_nowait(message)

    def end(self, status: int = OK, message: str = "") -> None:
        if not self._ended:
            self._ended, self.status, self.message = True, status, message
            self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self._queue.get()) is not None:
            yield message


class GrpcioTransport:
    """Carries `services` (by path) from `start` to `stop`, on the running event loop."""

    def __init__(self, services: Mapping[str, Service], max_message_bytes: int, keepalive_s: float) -> None:
        self._grpc = grpc.aio.server(options=_channel_options(max_message_bytes, keepalive_s))
        by_name: dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]] = {}
        for path, service in services.items():
            _, name, method = path.split("/")
            # No (de)serializers: bytes pass as they are. One kind of handler serves unary calls as well.
            by_name.setdefault(name, {})[method] = grpc.stream_stream_rpc_method_handler(_handler(service))
        self._grpc.add_generic_rpc_handlers(
            tuple(grpc.method_handlers_generic_handler(name, methods) for name, methods in by_name.items())
        )

    async def start(self, listen: str, credentials: grpc.ServerCredentials | None) -> int:
        """Begin to serve; returns the port. Raises RuntimeError where the address cannot be bound."""
        if credentials is not None:
            port = self._grpc.add_secure_port(listen, credentials)
        else:
            port = self._grpc.add_insecure_port(listen)
        await self._grpc.start()
        return port

    async def stop(self, drain_s: float) -> None:
        """Accept no calls, and wait for those that are open, at most `drain_s`."""
        await self._grpc.stop(drain_s)


def _handler(service: Service) -> Any:
    async def serve(requests: AsyncIterator[bytes], context: _RpcContext) -> None:
        answers = Answers()
        metadata = {key: str(value) for key, value in context.invocation_metadata() or ()}
        call = service(answers, metadata)
        reading = asyncio.create_task(_read(requests, call, answers))
        try:
            async for message in answers:
                await context.write(message)
            if reading.done():
                reading.result()  # what the call raised, raises here
        finally:
            reading.cancel()
            call.closed()
        if answers.status != OK:
            await context.abort(_STATUS[answers.status], answers.message)

    return serve


async def _read(requests: AsyncIterator[bytes], call: Call, answers: Answers) -> None:
    try:
        async for message in requests:
            call.received(message)
        call.half_closed()
    except Exception:
        answers.end()
        raise


_STATUS = {code.value[0]: code for code in grpc.StatusCode}


def _channel_options(max_message_bytes: int, keepalive_s: float) -> list[tuple[str, Any]]:
    keepalive_ms = round(keepalive_s * 1000)
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),  # full duplex gives bodies back
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        # Envoy pings too, with no call open; grpcio would answer the third such ping with GOAWAY.
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Otherwise a second router on the same port would silently take half of the connections.
        ("grpc.so_reuseport", 0),
    ]
