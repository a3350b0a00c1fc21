"""The real `extproc serve` as a process under test."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import grpc
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc

from demo.ports import free_port
from demo.process import Process
from demo.stack import toml
from extproc.services import EXTERNAL_PROCESSOR

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

BUFFERED = 2
SERVE = (sys.executable, "-m", "extproc", "serve")


class Serving(Process):
    """`extproc serve` with a configuration file of its own."""

    def __init__(self, directory: Path, *sections: dict[str, dict[str, Any]], env: Mapping[str, str] | None = None):
        self.port = free_port()
        self.file = directory / "extproc.toml"
        self.sections: dict[str, dict[str, Any]] = {
            "server": {"listen": f"127.0.0.1:{self.port}", "notice_s": 0.0, "drain_s": 1.0},
            "membership": {
                "source": "file",
                "file": str(directory / "fleet.json"),
                "poll_s": 0.05,
                "ask_models": False,
            },
            "health": {"enabled": False},
            "load": {"enabled": False},
            "admin": {"listen": ""},
        }
        for more in sections:
            self.sections.update(more)
        self._fleet = directory / "fleet.json"
        self.write()
        super().__init__([*SERVE, "--config", self.file], directory / "extproc.log", env)
        self._channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")

    def write(self) -> None:
        self.file.write_text(toml(self.sections), encoding="utf-8")

    def stop(self) -> None:
        self._channel.close()
        super().stop()

    def fleet(self, *endpoints: str) -> None:
        """Write the watched membership file."""
        self._fleet.write_text(json.dumps({"replicas": [{"endpoint": endpoint} for endpoint in endpoints]}))

    def lines(self) -> list[str]:
        """Of the log, without one that is still being written."""
        text = self.log()
        return text[: text.rfind("\n") + 1].splitlines()

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.lines() if line.startswith("{")]
        return [line for line in lines if line.get("event") == name]

    def wait_for(self, event: str, times: int = 1) -> dict[str, Any]:
        self.wait_ready(lambda: len(self.events(event)) >= times, f"{times} x {event!r}", 30.0)
        return self.events(event)[times - 1]

    def is_ready(self) -> bool:
        answer = health_pb2_grpc.HealthStub(self._channel).Check(
            health_pb2.HealthCheckRequest(service="readiness"), timeout=5
        )
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def route(self, body: bytes = b"", **headers: str) -> str | None:
        """The endpoint that a request is sent to; None where the router is silent."""
        *_, reply = self.process(iter(messages(body, headers)))
        if "envoy.lb" not in reply.dynamic_metadata:
            return None
        return str(reply.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"])

    def process(self, requests: Iterator[ProcessingRequest]) -> Iterator[ProcessingResponse]:
        """An ext_proc stream."""
        call = self._channel.stream_stream(
            f"/{EXTERNAL_PROCESSOR}/Process",
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )
        return call(requests, timeout=60)


def messages(body: bytes, headers: Mapping[str, str]) -> list[ProcessingRequest]:
    """A request as Envoy sends it with buffered bodies."""
    opening = ProcessingRequest(request_headers=HttpHeaders(end_of_stream=not body))
    opening.protocol_config.request_body_mode = BUFFERED
    for key, value in ({":method": "POST", ":path": "/v1/chat/completions"} | headers).items():
        opening.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    return [opening, ProcessingRequest(request_body=HttpBody(body=body, end_of_stream=True))] if body else [opening]
