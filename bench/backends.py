"""Instant OpenAI backends: listeners of one Envoy that answer as soon as the whole request is there."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, Final

from demo.ports import free_port, free_ports
from demo.process import Process
from demo.stack import ENVOY

if TYPE_CHECKING:
    from pathlib import Path

TYPE: Final = "type.googleapis.com/envoy.extensions"
COMPLETION: Final = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Yes."}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5},
}
METRICS: Final = "vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\nvllm:kv_cache_usage_perc 0.0\n"
ANSWERS: Final[dict[str, object]] = {
    # What ours asks.
    "/metrics": METRICS,
    "/-/healthz": "success",
    # What the peers ask a worker before they send anything to it.
    "/health": {},
    "/v1/models": {"object": "list", "data": [{"id": "m", "object": "model", "created": 0, "owned_by": "bench"}]},
    "/server_info": {"model_path": "m", "served_model_name": "m", "tp_size": 1, "dp_size": 1, "version": "0"},
    "/get_server_info": {"model_path": "m", "served_model_name": "m", "tp_size": 1, "dp_size": 1, "version": "0"},
    "/get_model_info": {"model_path": "m", "is_generation": True},
    "/": COMPLETION,
}


class Backends:
    """`count` backends on loopback, until closed. addresses: "127.0.0.1:port" each."""

    def __init__(self, count: int, directory: Path) -> None:
        ports = free_ports(count)
        self.addresses = [f"127.0.0.1:{port}" for port in ports]
        config = directory / "backends.json"
        config.write_text(json.dumps(_bootstrap(ports, free_port())), encoding="utf-8")
        self.process = Process(
            [ENVOY, "-c", config, "--concurrency", "1", "--disable-hot-restart", "--log-level", "error"],
            directory / "backends.log",
        )
        self.process.wait_ready(
            lambda: all(answers(f"http://{address}/health") for address in self.addresses), "the backends answer"
        )


def _bootstrap(ports: list[int], admin_port: int) -> dict[str, Any]:
    return {
        "admin": {"address": socket_address(admin_port)},
        "static_resources": {"listeners": [_listener(port) for port in ports]},
    }


def socket_address(port: int) -> dict[str, Any]:
    """A port of loopback, as Envoy writes it."""
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _listener(port: int) -> dict[str, Any]:
    routes = [
        {
            "match": {"prefix": path},
            "direct_response": {
                "status": 200,
                "body": {"inline_string": body if isinstance(body, str) else json.dumps(body)},
            },
            "response_headers_to_add": [
                {
                    "header": {"key": "content-type", "value": "application/json"},
                    "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
                }
            ],
        }
        for path, body in ANSWERS.items()
    ]
    manager = {
        "@type": f"{TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "backend",
        "http_filters": [
            # Waits for the body's end, as an engine must.
            {
                "name": "buffer",
                "typed_config": {"@type": f"{TYPE}.filters.http.buffer.v3.Buffer", "max_request_bytes": 1 << 26},
            },
            {"name": "router", "typed_config": {"@type": f"{TYPE}.filters.http.router.v3.Router"}},
        ],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
    }
    return {
        "name": f"backend_{port}",
        "address": socket_address(port),
        "per_connection_buffer_limit_bytes": 1 << 26,
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }


def answers(url: str) -> bool:
    """Whether a GET gets 200."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
