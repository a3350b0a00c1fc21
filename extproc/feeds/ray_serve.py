"""Members of Ray Serve applications, by the dashboard's REST API (Ray 2.60, direct ingress).

With direct ingress each replica of an application's ingress deployment has an HTTP port of its own:

    {"applications": {APP: {"deployments": {DEPLOYMENT: {"replicas": [{"replica_id": ID, "state": ..., ...}]}}}},
     "target_groups": [{"app_name": APP, "protocol": "HTTP",
                        "targets": [{"ip": ..., "port": ..., "name": "SERVE_REPLICA::APP#DEPLOYMENT#ID"}]}]}

The schema is marked alpha; everything that depends on it is here. While an application has no running replica the
target is Serve's own proxy, which must not be taken for one: only names of replicas count. Ports are used again by
later replicas, so a member is known by its replica id alone.

Targets are the replicas that run. One that was a target and is so no longer is judged by its state:

    state                                            it is
    RUNNING, UPDATING, RECOVERING                    a member: it serves while it is reconfigured, or while a
                                                     controller that was restarted gets to know it again
    STOPPING, PENDING_MIGRATION                      draining: it answers until its listener closes
    STOPPED, or not listed                           gone
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from extproc.address import join_address, split_address
from extproc.core.replica import Replica
from extproc.feeds.feed import FeedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

REPLICA_NAME: Final = "SERVE_REPLICA::"
SERVING: Final = frozenset({"RUNNING", "UPDATING", "RECOVERING"})
LEAVING: Final = frozenset({"STOPPING", "PENDING_MIGRATION"})
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
        self._known: dict[str, Replica] = {}
        self._session: aiohttp.ClientSession | None = None

    async def read(self) -> Sequence[Replica]:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LOOK_TIMEOUT_S))
        try:
            async with self._session.get(self._url) as response:
                if response.status != 200:
                    raise FeedError(f"{self._url} answered {response.status}")
                return self.members(await response.json(content_type=None))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise FeedError(f"{self._url}: {type(error).__name__} {error}".rstrip()) from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def members(self, document: Any) -> tuple[Replica, ...]:
        """The members by one answer, and by what was known before it. Raises FeedError, and then forgets nothing."""
        try:
            states = dict(_states(document))
            listed = {replica.id: replica for replica in self._targets(document)}
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise FeedError(f"{self._url} answered something else than Serve's applications: {error!r}") from error
        if not states and self._known:
            # This is what the dashboard says while there is no controller; replicas run on without one.
            raise FeedError(f"{self._url} lists no replica any more")
        members = {id_: replica for id_, replica in listed.items() if states.get(id_) != "STARTING"}
        taken = {replica.endpoint for replica in members.values()}
        for replica in self._known.values():
            if replica.endpoint not in taken and states.get(replica.id) in SERVING | LEAVING:
                members.setdefault(replica.id, replica)
        self._known = {
            id_: replace(replica, draining=states.get(id_) in LEAVING) for id_, replica in sorted(members.items())
        }
        return tuple(self._known.values())

    def _targets(self, document: Any) -> Iterator[Replica]:
        for group in document["target_groups"]:
            if group["protocol"] != "HTTP":
                continue
            app = group["app_name"]
            for target in group["targets"]:
                if not target["name"].startswith(REPLICA_NAME):
                    continue
                endpoint = join_address(target["ip"], target["port"])
                split_address(endpoint)  # refuses what is no address
                yield Replica(
                    id=target["name"].rpartition("#")[2],
                    endpoint=endpoint,
                    models=self._models.get(app, frozenset()),
                    weight=self._weights.get(app, 1.0),
                    route_prefix=(group.get("route_prefix") or "").rstrip("/"),
                )


def _states(document: Any) -> Iterator[tuple[str, str]]:
    for app in document["applications"].values():
        for deployment in app["deployments"].values():
            for replica in deployment["replicas"]:
                yield replica["replica_id"], replica["state"]
