"""Renders envoy/bootstrap.yaml from the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from extproc.address import split_address

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_HERE = Path(__file__).parent
_TEMPLATES = (_HERE / "_envoy" / "bootstrap.yaml", _HERE.parent / "envoy" / "bootstrap.yaml")  # wheel, checkout


@dataclass(frozen=True, slots=True)
class EnvoySettings:
    """Envoy's side. Measurements behind the defaults: envoy/README.md.

    listen, admin: "host:port"; the admin port can stop Envoy, so it stays on loopback.
    router: "host:port" of our gRPC port as Envoy reaches it; a name is resolved again and again. Empty: the port
        that the service listens on.
    max_body_bytes: longer bodies get 413. 8 MiB holds a prompt of about 2 million tokens.
    message_timeout_s: how long a request waits for the router before it goes to the fallback.
    response_headers: show the router the beginning of each answer: first token, status, the replica that served.
    retries: further attempts, on other replicas, where one refused the connection, answered 503, or died before it
        answered.
    round_robin_route: let a request with "x-balance: round_robin" pass by the router (for comparisons).
    access_log: write one line per request to stdout.
    otlp: "host:port" of an OpenTelemetry collector that takes OTLP over HTTP; empty: Envoy writes no spans. What share
        of the requests is traced, `telemetry.sample_ratio` says for both.
    """

    listen: str = "127.0.0.1:10000"
    admin: str = "127.0.0.1:9901"
    router: str = ""
    node_id: str = "envoy"
    max_body_bytes: int = 8 * 1024 * 1024
    message_timeout_s: float = 2.0
    response_headers: bool = True
    retries: int = 2
    round_robin_route: bool = False
    access_log: bool = False
    otlp: str = ""

    def __post_init__(self) -> None:
        for name in ("listen", "admin", "router", "otlp"):
            if address := getattr(self, name):
                try:
                    split_address(address)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
        if not (0 < self.max_body_bytes < 2**32):
            raise ValueError("max_body_bytes must be above 0 and below 4 GiB")
        if not self.message_timeout_s > 0:
            raise ValueError("message_timeout_s must be above 0")
        if self.retries < 0:
            raise ValueError("retries must be at least 0")


def render(
    settings: EnvoySettings, server_listen: str, session_headers: Sequence[str], sample_ratio: float = 1.0
) -> str:
    """The bootstrap as YAML.

    server_listen: where the service listens, "host:port".
    session_headers: what the fallback hashes, the first one present; `-` and `_` are tried alike.
    sample_ratio: share, 0..1, of the requests without a trace of their own that begin one.
    Raises ValueError on an address that is none.
    """
    template = next(path for path in _TEMPLATES if path.exists())
    values = _values(settings, settings.router or server_listen, session_headers, sample_ratio)
    bootstrap = _fill(yaml.safe_load(template.read_text(encoding="utf-8")), values)
    return yaml.dump(bootstrap, Dumper=_Plain, sort_keys=False, width=120)


def _values(
    settings: EnvoySettings, router: str, session_headers: Sequence[str], sample_ratio: float
) -> dict[str, Any]:
    return {
        "node_id": settings.node_id,
        "listen": _socket_address(settings.listen),
        "admin": _socket_address(settings.admin),
        "router": _socket_address(router),
        "max_body_bytes": settings.max_body_bytes,
        "message_timeout": f"{settings.message_timeout_s}s",
        "response_header_mode": "SEND" if settings.response_headers else "SKIP",
        "hash_policy": [{"header": {"header_name": name}, "terminal": True} for name in _spellings(session_headers)],
        "retries": settings.retries,
        "round_robin_route": settings.round_robin_route,
        "access_log": settings.access_log,
        "collector": _socket_address(settings.otlp) if settings.otlp else None,
        "collector_url": f"http://{settings.otlp}/v1/traces",
        "sampled_of_a_million": round(sample_ratio * 1_000_000),
    }


def _socket_address(listen: str) -> dict[str, Any]:
    host, port = split_address(listen)
    return {"address": host, "port_value": port}


def _spellings(names: Sequence[str]) -> list[str]:
    both = (spelling for name in names for spelling in (name.replace("_", "-"), name.replace("-", "_")))
    return list(dict.fromkeys(both))


def _fill(node: Any, values: Mapping[str, Any]) -> Any:
    """Put values for placeholders. What is None, or a map whose `only_if` is false, is left out of its parent."""
    match node:
        case {"only_if": condition, **rest}:
            return _fill(rest, values) if _fill(condition, values) else None
        case dict():
            filled = {key: _fill(value, values) for key, value in node.items()}
            return {key: value for key, value in filled.items() if value is not None}
        case list():
            return [item for item in (_fill(item, values) for item in node) if item is not None]
        case str() if node.startswith("${"):
            return values[node.removeprefix("${").removesuffix("}")]
    return node


class _Plain(yaml.SafeDumper):
    """Writes values out instead of YAML anchors: the same map stands in several places."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
