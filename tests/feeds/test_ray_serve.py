"""Members of Ray Serve: by answers as its dashboard gives them, and over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from extproc.core.replica import Replica
from extproc.feeds.feed import FeedError
from extproc.feeds.ray_serve import RayServeFeed
from tests.feeds.replica_server import ReplicaServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.feeds.replica_server import Answer

PATH = "/api/serve/applications/"
PROXY = {"ip": "127.0.0.1", "port": 8000, "instance_id": "", "name": "SERVE_PROXY_ACTOR-0a1b2c3d"}


def listed(id_: str, state: str = "RUNNING", **more: Any) -> dict[str, Any]:
    """A replica among those of its deployment; of a starting one no process is known yet."""
    seen = {} if state == "STARTING" else {"pid": 4711, "node_ip": "127.0.0.1", "actor_name": f"SERVE_REPLICA::{id_}"}
    return {"replica_id": id_, "state": state, "start_time_s": 1.0, **seen, **more}


def target(id_: str, port: int, app: str = "default", ip: str = "127.0.0.1") -> dict[str, Any]:
    return {"ip": ip, "port": port, "instance_id": "", "name": f"SERVE_REPLICA::{app}#Engine#{id_}"}


def group(*targets: dict[str, Any], app: str = "default", protocol: str = "HTTP") -> dict[str, Any]:
    return {
        "targets": list(targets),
        "route_prefix": "/",
        "protocol": protocol,
        "app_name": app,
        "ingress_deployment_name": "Engine",
    }


def answer(groups: list[dict[str, Any]], **replicas: list[dict[str, Any]]) -> dict[str, Any]:
    """A whole answer; replicas: by application."""
    return {
        "controller_info": {"node_ip": "127.0.0.1"},
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "applications": {
            app: {
                "name": app,
                "route_prefix": "/",
                "status": "RUNNING",
                "deployments": {"Engine": {"name": "Engine", "status": "HEALTHY", "replicas": theirs}},
            }
            for app, theirs in replicas.items()
        },
        "target_groups": groups,
    }


TWO = answer([group(target("a", 30000), target("b", 30001))], default=[listed("a"), listed("b")])
A, B = Replica("a", "127.0.0.1:30000"), Replica("b", "127.0.0.1:30001")
DRAINING_B = Replica("b", "127.0.0.1:30001", draining=True)


@pytest.fixture
def feed() -> RayServeFeed:
    return RayServeFeed("http://dashboard:8265/", {}, {})


def test_replicas_are_known_by_their_own_ids(feed: RayServeFeed) -> None:
    assert feed.members(TWO) == (A, B)


def test_serves_proxy_is_no_replica(feed: RayServeFeed) -> None:
    """It is the only target while an application has no running replica."""
    assert feed.members(answer([group(PROXY)], default=[listed("a", "STARTING")])) == ()
    assert feed.members(answer([group(PROXY, target("a", 30000))], default=[listed("a")])) == (A,)


def test_only_the_http_ports_count(feed: RayServeFeed) -> None:
    grpc, http = group(target("a", 40000), protocol="gRPC"), group(target("a", 30000))
    for groups in ([grpc, http], [http, grpc]):
        assert feed.members(answer(groups, default=[listed("a")])) == (A,)
    assert RayServeFeed("http://dashboard:8265", {}, {}).members(answer([grpc], default=[listed("a")])) == ()


def test_no_application_is_no_member(feed: RayServeFeed) -> None:
    assert feed.members(answer([])) == ()


@pytest.mark.parametrize(
    ("state", "members"),
    [
        ("STARTING", (A,)),
        ("RUNNING", (A, B)),
        ("UPDATING", (A, B)),
        ("RECOVERING", (A, B)),
        ("STOPPING", (A, DRAINING_B)),
        ("PENDING_MIGRATION", (A, DRAINING_B)),
    ],
)
def test_states_of_a_target(feed: RayServeFeed, state: str, members: tuple[Replica, ...]) -> None:
    both = [group(target("a", 30000), target("b", 30001))]
    assert feed.members(answer(both, default=[listed("a"), listed("b", state)])) == members


@pytest.mark.parametrize(
    ("state", "members"),
    [
        ("RUNNING", (A, B)),
        ("UPDATING", (A, B)),
        ("RECOVERING", (A, B)),
        ("STOPPING", (A, DRAINING_B)),
        ("PENDING_MIGRATION", (A, DRAINING_B)),
        ("STARTING", (A,)),
        ("STOPPED", (A,)),
        (None, (A,)),
    ],
)
def test_states_of_one_that_was_a_target(feed: RayServeFeed, state: str | None, members: tuple[Replica, ...]) -> None:
    feed.members(TWO)
    replicas = [listed("a")] if state is None else [listed("a"), listed("b", state)]
    later = answer([group(target("a", 30000))], default=replicas)
    assert feed.members(later) == members
    assert feed.members(later) == members


def test_one_that_never_was_a_target_is_none(feed: RayServeFeed) -> None:
    running_without_port = answer([group(target("a", 30000))], default=[listed("a"), listed("b")])
    assert feed.members(running_without_port) == (A,)


def test_a_draining_replica_can_come_back(feed: RayServeFeed) -> None:
    feed.members(TWO)
    feed.members(answer([group(target("a", 30000))], default=[listed("a"), listed("b", "PENDING_MIGRATION")]))
    assert feed.members(TWO) == (A, B)


def test_a_port_that_is_used_again_belongs_to_the_new_replica(feed: RayServeFeed) -> None:
    feed.members(TWO)
    reused = answer(
        [group(target("a", 30000), target("c", 30001))], default=[listed("a"), listed("b", "STOPPING"), listed("c")]
    )
    assert feed.members(reused) == (A, Replica("c", "127.0.0.1:30001"))


def test_applications_have_their_models_and_weights() -> None:
    feed = RayServeFeed("http://dashboard:8265", {"small": ["m", "m-chat"]}, {"large": 2.0})
    document = answer(
        [group(target("a", 30000, "small"), app="small"), group(target("b", 30001, "large"), app="large")],
        small=[listed("a")],
        large=[listed("b")],
    )
    assert feed.members(document) == (
        Replica("a", "127.0.0.1:30000", frozenset({"m", "m-chat"})),
        Replica("b", "127.0.0.1:30001", weight=2.0),
    )


@pytest.mark.parametrize(
    ("said", "prefix"), [("/", ""), (None, ""), ("/chat", "/chat"), ("/chat/", "/chat"), ("/a/b", "/a/b")]
)
def test_applications_have_their_paths(feed: RayServeFeed, said: str | None, prefix: str) -> None:
    document = answer([{**group(target("a", 30000)), "route_prefix": said}], default=[listed("a")])
    assert feed.members(document) == (Replica("a", "127.0.0.1:30000", route_prefix=prefix),)


def test_an_ipv6_target_has_brackets(feed: RayServeFeed) -> None:
    document = answer([group(target("a", 30000, ip="fd00::1"))], default=[listed("a")])
    assert feed.members(document) == (Replica("a", "[fd00::1]:30000"),)


ODD = {
    "null": None,
    "a list": [],
    "a number": 7,
    "an error": {"error": "no controller"},
    "no target groups": {"applications": {}},
    "no applications": {"target_groups": []},
    "applications as a list": {**TWO, "applications": []},
    "deployments as null": {**TWO, "applications": {"default": {"deployments": None}}},
    "a replica without state": answer([group(target("a", 30000))], default=[{"replica_id": "a"}]),
    "a target without port": answer([group({"ip": "127.0.0.1", "name": "SERVE_REPLICA::x#y#a"})], default=[]),
    "a port beyond all": answer([group(target("a", 70000))], default=[listed("a")]),
    "no address": answer([group(target("a", 30000, ip=""))], default=[listed("a")]),
    "a number for an address": answer([group({**target("a", 1), "ip": 7})], default=[listed("a")]),
    "a number for a path": answer([{**group(target("a", 1)), "route_prefix": 7}], default=[listed("a")]),
    "no name": answer([group({**target("a", 1), "name": None})], default=[listed("a")]),
}


@pytest.mark.parametrize("document", ODD.values(), ids=ODD.keys())
def test_something_else_is_a_failed_look_and_forgets_nothing(feed: RayServeFeed, document: Any) -> None:
    with pytest.raises(FeedError, match="http://dashboard:8265/api/serve/applications/"):
        feed.members(document)
    feed.members(TWO)
    with pytest.raises(FeedError):
        feed.members(document)
    leaving = answer([group(target("a", 30000))], default=[listed("a"), listed("b", "STOPPING")])
    assert feed.members(leaving) == (A, DRAINING_B)


def test_a_dashboard_without_controller_is_a_failed_look_and_forgets_nothing(feed: RayServeFeed) -> None:
    feed.members(TWO)
    for _ in range(2):
        with pytest.raises(FeedError, match="lists no replica any more"):
            feed.members(answer([]))
    assert feed.members(TWO) == (A, B)


# --- over HTTP ---


def page(document: Any) -> dict[str, Answer]:
    return {PATH: (200, json.dumps(document).encode())}


@contextlib.asynccontextmanager
async def following(server: ReplicaServer) -> AsyncIterator[RayServeFeed]:
    feed = RayServeFeed(f"http://{server.endpoint}", {}, {})
    try:
        yield feed
    finally:
        await feed.close()


async def test_the_dashboard_is_asked_on_one_connection() -> None:
    async with ReplicaServer(page(TWO)) as dashboard, following(dashboard) as feed:
        for _ in range(3):
            assert await feed.read() == (A, B)
        assert dashboard.asked == [PATH] * 3
        assert dashboard.connections == 1


@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        ((500, b"Internal Server Error"), "answered 500"),
        ((503, json.dumps(TWO).encode()), "answered 503"),
        ((200, b"<html>Sign in</html>"), "JSONDecodeError"),
        ((200, b""), "something else"),
        ((200, b"\xff\xfe"), "UnicodeDecodeError"),
        ((200, json.dumps(TWO).encode()[:-20]), "JSONDecodeError"),
    ],
)
async def test_trouble_is_a_failed_look_and_passes(trouble: Answer, why: str) -> None:
    async with ReplicaServer({PATH: trouble}) as dashboard, following(dashboard) as feed:
        with pytest.raises(FeedError, match=why):
            await feed.read()
        dashboard.pages = page(TWO)
        assert await feed.read() == (A, B)


async def test_what_is_no_http_is_a_failed_look() -> None:
    async with ReplicaServer(raw=b"SSH-2.0-OpenSSH_9.6\r\n\r\n") as dashboard, following(dashboard) as feed:
        with pytest.raises(FeedError, match=dashboard.endpoint):
            await feed.read()


async def test_a_dashboard_that_hangs_is_given_up() -> None:
    async with ReplicaServer(page(TWO), hang=True) as dashboard, following(dashboard) as feed:
        async with asyncio.timeout(10):
            with pytest.raises(FeedError, match="Timeout"):
                await feed.read()
        dashboard.hang = False
        assert await feed.read() == (A, B)


async def test_a_dashboard_that_is_gone_is_a_failed_look_and_found_again() -> None:
    async with ReplicaServer(page(TWO)) as dashboard, following(dashboard) as feed:
        assert await feed.read() == (A, B)
        await dashboard.__aexit__()
        with pytest.raises(FeedError):
            await feed.read()
        async with ReplicaServer(page(TWO), port=dashboard.port):
            assert await feed.read() == (A, B)
