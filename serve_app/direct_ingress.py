"""Everything here that rests on Ray Serve's direct ingress, which Ray gates by environment and calls alpha.

With direct ingress each replica of an application's ingress deployment listens on an HTTP port of its own,
with health (`/-/healthz`), draining and back-pressure, and Serve's REST API lists the addresses. That is what
lets Envoy reach one exact replica. As seen in Ray 2.60.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException
from starlette.middleware import Middleware

from serve_app.replica_id import ReplicaIdMiddleware

_REPLICA = "SERVE_REPLICA::"


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """A replica that takes requests. endpoint: "ip:port". pid: of its process on `ip`."""

    id: str
    endpoint: str
    pid: int


def environment(first_port: int, ports: int, min_draining_s: float) -> dict[str, str]:
    """What has to be exported before `ray start`: the controller and the replicas both read it.

    first_port, ports: the replicas of a node listen there, lowest free port first (Ray: 30000, 1000 ports).
    min_draining_s: how long a replica that is scaled away keeps listening at least (Ray: 30 s).
    """
    return {
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first_port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first_port + ports),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(min_draining_s),
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}:http_middlewares",
    }


def replica_id() -> str:
    """This replica's id: `replica_id` in Serve's REST API. Raises RayServeException outside a replica."""
    return str(serve.get_replica_context().replica_id.unique_id)


def http_middlewares() -> list[Middleware]:
    """Called by Serve as it opens an HTTP listener: names the replica on answers that Serve gives by itself
    (health, back-pressure), which never reach the application."""
    try:
        return [Middleware(ReplicaIdMiddleware, replica_id=replica_id())]
    except RayServeException:
        return []  # Serve's proxy, which is no replica


def replicas(serve_details: dict[str, Any], app_name: str) -> list[ReplicaAddress]:
    """The replicas of an application in an answer of `GET /api/serve/applications/`.

    While an application has no running replica its target group names Serve's proxy instead: not a replica.
    """
    application = serve_details["applications"].get(app_name, {})
    pids = {
        replica["replica_id"]: replica.get("pid")  # no pid while it starts
        for deployment in application.get("deployments", {}).values()
        for replica in deployment["replicas"]
    }
    found = []
    for group in serve_details.get("target_groups", ()):
        if group["app_name"] != app_name or group["protocol"] != "HTTP":
            continue
        for target in group["targets"]:
            unique_id = target["name"].rpartition("#")[2]
            if target["name"].startswith(_REPLICA) and (pid := pids.get(unique_id)):
                found.append(ReplicaAddress(unique_id, f"{target['ip']}:{target['port']}", pid))
    return found
