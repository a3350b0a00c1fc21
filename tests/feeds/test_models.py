"""Replicas that are asked what they serve."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from demo.ports import free_port
from extproc.core.replica import Replica
from extproc.feeds.feed import FeedError
from extproc.feeds.models import ANSWER_TIMEOUT_S, ASK_AGAIN_AFTER, WithModels
from tests.feeds.replica_server import ReplicaServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.feeds.replica_server import Answer

PATH = "/v1/models"


def naming(*models: str) -> dict[str, Answer]:
    """As OpenAI and vLLM answer."""
    data = [{"id": model, "object": "model", "created": 1, "owned_by": "vllm"} for model in models]
    return {PATH: (200, json.dumps({"object": "list", "data": data}).encode())}


class Fleet:
    """A feed whose members the test changes. error: what the next looks fail with."""

    def __init__(self, *replicas: Replica) -> None:
        self.replicas: Sequence[Replica] = replicas
        self.error: FeedError | None = None
        self.closed = False

    async def read(self) -> Sequence[Replica]:
        if self.error is not None:
            raise self.error
        return self.replicas

    async def close(self) -> None:
        self.closed = True


@contextlib.asynccontextmanager
async def asking(fleet: Fleet) -> AsyncIterator[WithModels]:
    feed = WithModels(fleet)
    try:
        yield feed
    finally:
        await feed.close()
        assert fleet.closed


async def models(feed: WithModels) -> dict[str, set[str]]:
    return {replica.id: set(replica.models) for replica in await feed.read()}


async def test_a_replica_is_asked_once() -> None:
    async with ReplicaServer(naming("m", "adapter")) as server, asking(Fleet(server.replica())) as feed:
        for _ in range(ASK_AGAIN_AFTER + 1):
            assert await models(feed) == {"a": {"m", "adapter"}}
        assert server.asked == [PATH]


async def test_what_the_source_says_is_not_asked() -> None:
    async with ReplicaServer(naming("other")) as server:
        known = Replica("a", server.endpoint, frozenset({"m"}))
        async with asking(Fleet(known)) as feed:
            assert list(await feed.read()) == [known]
        assert server.asked == []


async def test_two_models_side_by_side() -> None:
    async with (
        ReplicaServer(naming("m")) as one,
        ReplicaServer(naming("n")) as other,
        asking(Fleet(one.replica("a"), other.replica("b"))) as feed,
    ):
        assert await models(feed) == {"a": {"m"}, "b": {"n"}}


async def test_a_replica_under_a_path_is_asked_there() -> None:
    pages = {f"/chat{PATH}": naming("m")[PATH]}
    async with ReplicaServer(pages) as server:
        under = Replica("a", server.endpoint, route_prefix="/chat")
        async with asking(Fleet(under)) as feed:
            assert list(await feed.read()) == [replace(under, models=frozenset({"m"}))]


@pytest.mark.parametrize(
    "trouble",
    [
        (404, b"not found"),
        (500, b'{"error": "starting"}'),
        (200, b"<html>"),
        (200, b"null"),
        (200, b"[]"),
        (200, b'{"data": null}'),
        (200, b'{"data": [1]}'),
        (200, b'{"data": [{"name": "m"}]}'),
        (200, b'{"data": [{"id": 7}]}'),
        (200, b'{"data": []}'),
        (200, b"\xff"),
    ],
)
async def test_one_that_does_not_say_serves_any_and_is_asked_again(trouble: Answer) -> None:
    async with (
        ReplicaServer({PATH: trouble}) as silent,
        ReplicaServer(naming("m")) as other,
        asking(Fleet(silent.replica("a"), other.replica("b"))) as feed,
    ):
        for _ in range(ASK_AGAIN_AFTER):
            assert await models(feed) == {"a": set(), "b": {"m"}}
        assert len(silent.asked) == 1
        silent.pages = naming("n")
        assert await models(feed) == {"a": {"n"}, "b": {"m"}}
        assert len(silent.asked) == 2


async def test_one_that_refuses_or_hangs_delays_no_other_for_long() -> None:
    refusing = Replica("refusing", f"127.0.0.1:{free_port()}")
    async with (
        ReplicaServer(hang=True) as hanging,
        ReplicaServer(naming("m")) as well,
        asking(Fleet(refusing, hanging.replica("hanging"), well.replica("well"))) as feed,
        asyncio.timeout(1.5 * ANSWER_TIMEOUT_S),
    ):
        for _ in range(2):
            assert await models(feed) == {"refusing": set(), "hanging": set(), "well": {"m"}}
        assert len(hanging.asked) == 1


async def test_another_replica_on_the_same_port_is_asked_anew() -> None:
    async with ReplicaServer(naming("m")) as server:
        fleet = Fleet(server.replica("a"))
        async with asking(fleet) as feed:
            assert await models(feed) == {"a": {"m"}}
            server.pages = naming("n")
            fleet.replicas = [server.replica("b")]
            assert await models(feed) == {"b": {"n"}}
            fleet.replicas = [server.replica("a")]
            assert await models(feed) == {"a": {"n"}}


async def test_a_failed_look_stays_one_and_forgets_nothing() -> None:
    async with ReplicaServer(naming("m")) as server:
        fleet = Fleet(server.replica())
        async with asking(fleet) as feed:
            await feed.read()
            fleet.error = FeedError("gone")
            with pytest.raises(FeedError, match="gone"):
                await feed.read()
            fleet.error = None
            assert await models(feed) == {"a": {"m"}}
        assert server.asked == [PATH]
