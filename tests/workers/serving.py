"""The real `extproc serve` with workers, and what is seen of them from outside."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import grpc
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse

from demo.ports import free_port
from demo.wait import wait_until
from extproc.services import EXTERNAL_PROCESSOR
from tests.component.serving import Serving, messages

if TYPE_CHECKING:
    from collections.abc import Mapping


class ServingByWorkers(Serving):
    """With an admin port, on which the parent says what it holds."""

    def __init__(
        self,
        directory: Path,
        *sections: dict[str, dict[str, Any]],
        workers: int = 2,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.admin = f"127.0.0.1:{free_port()}"
        env = {"EXTPROC_SERVER__WORKERS": str(workers), **(env or {})}
        super().__init__(directory, {"admin": {"listen": self.admin}}, *sections, env=env)

    def workers(self) -> set[int]:
        """Their process ids."""
        return children(self.pid)

    def page(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.admin}{path}", timeout=5) as answer:
            text: str = answer.read().decode()
            return text

    def in_flight(self) -> dict[str, int]:
        """By replica, those that have any."""
        replicas = json.loads(self.page("/debug/replicas"))
        return {each["id"]: each["in_flight"] for each in replicas if each["in_flight"]}

    def wait_in_flight(self, expected: Mapping[str, int]) -> None:
        wait_until(lambda: self.in_flight() == expected, f"in flight: {dict(expected)}")

    def client(self) -> Client:
        """One with a connection of its own."""
        return Client(f"127.0.0.1:{self.port}")


class Client:
    """One of several Envoys, as far as workers can tell; leaving the context closes its connection."""

    def __init__(self, address: str, authority: bytes = b"", name: str = "") -> None:
        """authority: the certificate that it trusts, TLS then; name: of the server."""
        options: list[tuple[str, Any]] = [("grpc.use_local_subchannel_pool", 1)]
        if authority:
            options.append(("grpc.ssl_target_name_override", name))
            self._channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(authority), options)
        else:
            self._channel = grpc.aio.insecure_channel(address, options)

    async def open(self, body: bytes = b"", **headers: str) -> OpenRequest:
        """Have a request routed, and leave its stream open."""
        call = self._process()
        for message in messages(body, headers):
            await call.write(message)
            reply = await call.read()
        if "envoy.lb" not in reply.dynamic_metadata:
            return OpenRequest(call, None)
        return OpenRequest(call, reply.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"])

    async def say_nonsense(self) -> None:
        """And be told so."""
        call = self._process()
        await call.write(ProcessingRequest())
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT

    def _process(self) -> Any:
        make: Any = self._channel.stream_stream(
            f"/{EXTERNAL_PROCESSOR}/Process",
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )
        return make(timeout=60)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()


@dataclass
class OpenRequest:
    """A stream whose request has been routed. endpoint: where to; None where the router is silent."""

    call: Any
    endpoint: str | None

    async def end(self) -> None:
        await self.call.done_writing()
        assert await self.call.read() == grpc.aio.EOF  # type: ignore[attr-defined]  # missing in its stubs


def children(pid: int) -> set[int]:
    """Of a process, those that live."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        found |= {int(child) for child in (task / "children").read_text().split()}
    return {each for each in found if is_alive(each)}


def is_alive(pid: int) -> bool:
    """False for one that has ended and nobody has asked about yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
