"""Renders envoy/bootstrap.yaml, and the secrets that it names, from the configuration."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

import yaml

from extproc.address import check_address, socket_path, split_address
from extproc.messages import READ_HEADERS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from extproc.core.settings import FeatureSettings

_HERE = Path(__file__).parent
_TEMPLATES = (_HERE / "_envoy" / "bootstrap.yaml", _HERE.parent / "envoy" / "bootstrap.yaml")  # wheel, checkout

ROUTER_CA: Final = "router-ca"
ROUTER_CLIENT: Final = "router-client"


@dataclass(frozen=True, slots=True)
class EnvoySettings:
    """Envoy's side. Measurements behind the defaults: envoy/README.md.

    listen, admin: "host:port"; the admin port can stop Envoy, so it stays on loopback.
    router: our gRPC port as Envoy reaches it, "host:port" or "unix:/path"; a name is resolved again and again. Empty:
        where the service listens.
    router_tls_ca: PEM file of the authority that signed the router's certificate, as Envoy sees it. Empty: plain text.
    router_tls_name: the name or address that the certificate must bear. Empty: the host of `router`.
    router_tls_certificate, router_tls_key: PEM files, as Envoy sees them: what Envoy shows a router that asks for a
        certificate. Envoy reads these files again when something is moved into their directory, which is how a
        mounted Kubernetes secret changes.
    max_body_bytes: longer bodies get 413. 8 MiB holds a prompt of about 2 million tokens.
    max_heap_bytes: beyond this much memory Envoy answers new requests with 503. 4 GiB holds 512 of the longest bodies.
    request_timeout_s: time for a whole request to come in, body and all; 408 ends a longer one. Answers may take any
        time. Default: Envoy's advice for an edge (its documentation, "Configuring Envoy as an edge proxy").
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
    router_tls_ca: str = ""
    router_tls_name: str = ""
    router_tls_certificate: str = ""
    router_tls_key: str = ""
    node_id: str = "envoy"
    max_body_bytes: int = 8 * 1024 * 1024
    max_heap_bytes: int = 4 * 1024**3
    request_timeout_s: float = 300.0
    message_timeout_s: float = 2.0
    response_headers: bool = True
    retries: int = 2
    round_robin_route: bool = False
    access_log: bool = False
    otlp: str = ""

    def __post_init__(self) -> None:
        for name, check in (
            ("listen", split_address),
            ("admin", split_address),
            ("router", check_address),
            ("otlp", split_address),
        ):
            if address := getattr(self, name):
                try:
                    check(address)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
        if bool(self.router_tls_certificate) != bool(self.router_tls_key):
            raise ValueError("router_tls_certificate and router_tls_key go together")
        if self.router_tls_certificate and not self.router_tls_ca:
            raise ValueError("router_tls_certificate needs router_tls_ca")
        if not (0 < self.max_body_bytes < 2**32):
            raise ValueError("max_body_bytes must be above 0 and below 4 GiB")
        if not self.max_heap_bytes > self.max_body_bytes:
            raise ValueError("max_heap_bytes must be above max_body_bytes")
        if not (self.message_timeout_s > 0 and self.request_timeout_s > 0):
            raise ValueError("message_timeout_s and request_timeout_s must be above 0")
        if self.retries < 0:
            raise ValueError("retries must be at least 0")


def max_unread_bytes(settings: EnvoySettings) -> int:
    """The longest body that Envoy may be told to keep to itself. 0: none.

    Telling it changes its modes as a whole, and it does not hold such a body against its limit.
    """
    return settings.max_body_bytes if settings.response_headers else 0


def render(
    settings: EnvoySettings,
    server_listen: str,
    features: FeatureSettings,
    sample_ratio: float = 1.0,
    secrets_directory: Path = Path("/etc/envoy"),
) -> str:
    """The bootstrap as YAML.

    server_listen: where the service listens.
    features: name the headers that Envoy shows the router; of those of sessions the fallback hashes the first one
        present. `-` and `_` are tried alike.
    sample_ratio: share, 0..1, of the requests without a trace of their own that begin one.
    secrets_directory: where Envoy finds the files of `render_secrets`.
    Raises ValueError on an address that is none, and where TLS knows no name to expect.
    """
    template = next(path for path in _TEMPLATES if path.exists())
    values = _values(settings, features, sample_ratio)
    values |= _router(settings, settings.router or server_listen, secrets_directory)
    return _yaml(_fill(yaml.safe_load(template.read_text(encoding="utf-8")), values))


def render_secrets(settings: EnvoySettings) -> dict[str, str]:
    """File name -> YAML, one secret each: Envoy reads certificates again only where such a file names them."""
    secrets: dict[str, dict[str, Any]] = {}
    if settings.router_tls_ca:
        secrets[ROUTER_CA] = {
            "validation_context": {
                "trusted_ca": {"filename": settings.router_tls_ca},
                "watched_directory": _directory(settings.router_tls_ca),
            }
        }
    if settings.router_tls_certificate:
        secrets[ROUTER_CLIENT] = {
            "tls_certificate": {
                "certificate_chain": {"filename": settings.router_tls_certificate},
                "private_key": {"filename": settings.router_tls_key},
                "watched_directory": _directory(settings.router_tls_certificate),
            }
        }
    kind = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"
    return {
        f"{name}.yaml": _yaml({"resources": [{"@type": kind, "name": name, **secret}]})
        for name, secret in secrets.items()
    }


def _values(settings: EnvoySettings, features: FeatureSettings, sample_ratio: float) -> dict[str, Any]:
    hashed = _spellings(features.session_headers)
    return {
        "node_id": settings.node_id,
        "listen": _socket_address(settings.listen),
        "admin": _socket_address(settings.admin),
        "max_body_bytes": settings.max_body_bytes,
        "max_heap_bytes": settings.max_heap_bytes,
        "request_timeout": f"{settings.request_timeout_s}s",
        "message_timeout": f"{settings.message_timeout_s}s",
        "allow_unread_bodies": max_unread_bytes(settings) > 0,
        "response_header_mode": "SEND" if settings.response_headers else "SKIP",
        "hash_policy": [{"header": {"header_name": name}, "terminal": True} for name in hashed],
        "read_headers": "|".join([*map(re.escape, READ_HEADERS), *map(_any_spelling, features.headers)]),
        "retries": settings.retries,
        "round_robin_route": settings.round_robin_route,
        "access_log": settings.access_log,
        "collector": _socket_address(settings.otlp) if settings.otlp else None,
        "collector_url": f"http://{settings.otlp}/v1/traces",
        "sampled_of_a_million": round(sample_ratio * 1_000_000),
    }


def _router(settings: EnvoySettings, router: str, secrets: Path) -> dict[str, Any]:
    path = socket_path(router)
    name = settings.router_tls_name or ("" if path else split_address(router)[0])
    if settings.router_tls_ca and not name:
        raise ValueError(f"router_tls_name is needed: {router} bears no name that a certificate could")
    return {
        "router": {"pipe": {"path": path}} if path else {"socket_address": _socket_address(router)},
        "router_discovery": "STATIC" if path else "STRICT_DNS",
        "router_tls": bool(settings.router_tls_ca),
        "router_ca": _secret(secrets, ROUTER_CA),
        "router_client": [_secret(secrets, ROUTER_CLIENT)] if settings.router_tls_certificate else None,
        "router_server_name": None if _is_ip(name) else name,
        "router_identity": [{"san_type": "IP_ADDRESS" if _is_ip(name) else "DNS", "matcher": {"exact": name}}],
    }


def _secret(directory: Path, name: str) -> dict[str, Any]:
    source = {"path_config_source": {"path": str(directory / f"{name}.yaml")}, "resource_api_version": "V3"}
    return {"name": name, "sds_config": source}


def _directory(file: str) -> dict[str, str]:
    return {"path": str(PurePosixPath(file).parent)}


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _socket_address(listen: str) -> dict[str, Any]:
    host, port = split_address(listen)
    return {"address": host, "port_value": port}


def _spellings(names: Sequence[str]) -> list[str]:
    both = (spelling for name in names for spelling in (name.replace("_", "-"), name.replace("-", "_")))
    return list(dict.fromkeys(both))


def _any_spelling(name: str) -> str:
    return re.escape(name).replace("\\-", "[-_]")


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


def _yaml(document: Any) -> str:
    return yaml.dump(document, Dumper=_Plain, sort_keys=False, width=120)


class _Plain(yaml.SafeDumper):
    """Writes values out instead of YAML anchors: the same map stands in several places."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
