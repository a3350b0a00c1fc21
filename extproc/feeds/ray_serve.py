"""Members of Ray Serve applications, by the dashboard's REST API (Ray 2.60, direct ingress).

With direct ingress each replica of an application's ingress deployment has an HTTP port of its own:

    {"applications": {APP: {"deployments": {DEPLOYMENT: {"replicas": [{"replica_id": ID, "state": ..., ...}]}}}},
     "target_groups": [{"app_name": APP, "ingress_deployment_name": DEPLOYMENT,
                        "targets": [{"ip": ..., "port": ..., "name": "SERVE_REPLICA::APP#DEPLOYMENT#ID"}]}]}

The schema is marked alpha; everything that depends on it is here. While an application has no running replica the
target is Serve's own proxy, which must not be taken for one: only names of replicas count. Ports are used again by
later replicas, so a member is known by its replica id alone.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from extproc.core.replica import Replica
from extproc.feeds.feed import FeedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

REPLICA_NAME: Final = "SERVE_REPLICA::"
RUNNING: Final = frozenset({"RUNNING", "PENDING_MIGRATION"})
LEAVING: Final = frozenset({"STOPPING", "DRAINING"})
LOOK_TIMEOUT_S: Final = 2.0
"""An idle dashboard answers in 9-15 ms; a busy one is given its time, and meanwhile the last answer holds."""


class RayServeFeed:
    """Polls one Ray cluster's dashboard.

    url: of the dashboard. models: application -> the model names that it serves; one that is not in it is asked.
    weights: application -> relative speed of its replicas.
    """

    def __init__(self, url: str, models: Mapping[str, Sequence[str]], weights: Mapping[str, float]) -> None:
        self._url = url.rstrip("/") + "/api/serve/applications/"
        self._models = {app: frozenset(names) for app, names in models.items()}
        self._weights = dict(weights)
        self._session: aiohttp.ClientSession | None = None

    async def read(self) -> Sequence[Replica]:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LOOK_TIMEOUT_S))
        try:
            async with self._session.get(self._url) as response:
                if response.status != 200:
                    raise FeedError(f"{self._url} answered {response.status}")
                return self.members(await response.json(content_type=None))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise FeedError(f"{self._url}: {type(error).__name__} {error}".rstrip()) from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def members(self, document: Any) -> tuple[Replica, ...]:
        """The replicas in one answer. Raises FeedError where it is not of the shape above."""
        try:
            states = dict(_states(document))
            members: dict[str, Replica] = {}
            for group in document.get("target_groups", ()):
                if group.get("protocol", "HTTP") != "HTTP":
                    continue
                app = group["app_name"]
                for target in group["targets"]:
                    replica_id = _replica_id(target["name"])
                    state = states.get(replica_id or "", "RUNNING")
                    if replica_id is None or state not in RUNNING | LEAVING:
                        continue
                    members[replica_id] = Replica(
                        id=replica_id,
                        endpoint=_endpoint(target["ip"], target["port"]),
                        models=self._models.get(app, frozenset()),
                        weight=self._weights.get(app, 1.0),
                        draining=state in LEAVING,
                    )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise FeedError(f"{self._url} answered something else than Serve's applications: {error!r}") from error
        return tuple(members.values())


def _states(document: Any) -> Iterator[tuple[str, str]]:
    for app in document["applications"].values():
        for deployment in app["deployments"].values():
            for replica in deployment["replicas"]:
                yield replica["replica_id"], replica["state"]


def _replica_id(target_name: str) -> str | None:
    if not target_name.startswith(REPLICA_NAME):
        return None
    return target_name.rpartition("#")[2] or None


def _endpoint(ip: str, port: int) -> str:
    address = ipaddress.ip_address(ip)  # Envoy's endpoint discovery takes no names
    if not 0 < port < 65536:
        raise ValueError(f"no port: {port}")
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
