"""Rounds over real servers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from demo.ports import free_port
from demo.wait import until
from extproc.core.replica import Replica
from extproc.feeds.rounds import Rounds
from tests.feeds.replica_server import ReplicaServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from extproc.feeds.connection import Connection

PAGE = {"/": (200, b"ok")}
POLL_S = 0.05


class Ward:
    """Goes its rounds and writes down what it hears."""

    def __init__(self, *members: Replica, timeout_s: float = 0.5) -> None:
        self.members = list(members)
        self.answers: list[tuple[str, bytes]] = []
        self.failures: list[tuple[str, Exception]] = []
        self.rounds = Rounds(POLL_S, timeout_s, lambda: self.members, self._ask, self._failed)

    async def _ask(self, replica: Replica, connection: Connection) -> None:
        self.answers.append((replica.id, (await connection.get("/")).body))

    def _failed(self, replica: Replica, why: Exception) -> None:
        self.failures.append((replica.id, why))

    @contextlib.asynccontextmanager
    async def on_duty(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.rounds.run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def heard(self, replica_id: str, times: int = 1) -> None:
        async def enough() -> bool:
            return sum(id_ == replica_id for id_, _ in self.answers) >= times

        await until(enough, f"{times} answers of {replica_id}")

    async def missed(self, replica_id: str) -> None:
        async def failed() -> bool:
            return any(id_ == replica_id for id_, _ in self.failures)

        await until(failed, f"a failure of {replica_id}")


async def test_everyone_is_asked_again_and_again_on_a_connection_of_its_own() -> None:
    async with ReplicaServer(PAGE) as one, ReplicaServer(PAGE) as two:
        ward = Ward(one.replica("a"), two.replica("b"))
        async with ward.on_duty():
            await ward.heard("a", 4)
            await ward.heard("b", 4)
        assert (one.connections, two.connections) == (1, 1)
        assert not ward.failures


async def test_one_that_hangs_delays_nobody() -> None:
    async with ReplicaServer(PAGE, hang=True) as hanging, ReplicaServer(PAGE) as well:
        ward = Ward(hanging.replica("hanging"), well.replica("well"), timeout_s=30.0)
        async with ward.on_duty():
            began_s = time.monotonic()
            await ward.heard("well", 5)
            assert time.monotonic() - began_s < 10
        assert len(hanging.asked) == 1  # and is not asked again while it has not answered


async def test_one_that_hangs_is_given_up_after_its_time_and_asked_again() -> None:
    async with ReplicaServer(PAGE, hang=True) as server:
        ward = Ward(server.replica(), timeout_s=0.05)
        async with ward.on_duty():
            await ward.missed("a")
            server.hang = False
            await ward.heard("a")
    assert {type(why) for _, why in ward.failures} == {TimeoutError}


async def test_one_that_refuses_does_not_end_the_rounds() -> None:
    async with ReplicaServer(PAGE) as well:
        ward = Ward(Replica("gone", f"127.0.0.1:{free_port()}"), well.replica("well"))
        async with ward.on_duty():
            await ward.missed("gone")
            await ward.heard("well", 3)


async def test_members_come_and_go() -> None:
    async with ReplicaServer(PAGE) as one, ReplicaServer(PAGE) as two:
        ward = Ward()
        async with ward.on_duty():
            ward.members = [one.replica("a")]
            await ward.heard("a")
            ward.members = [two.replica("b")]
            await ward.heard("b", 3)
            asked = len(one.asked)
            await ward.heard("b", 6)
            assert len(one.asked) <= asked + 1  # a question may have been on its way


async def test_a_port_that_belongs_to_another_replica_now_is_asked_for_that_one() -> None:
    async with ReplicaServer(PAGE) as server:
        ward = Ward(server.replica("old"))
        async with ward.on_duty():
            await ward.heard("old")
            ward.members = [server.replica("new")]
            await ward.heard("new", 2)
        assert [id_ for id_, _ in ward.answers[-2:]] == ["new", "new"]
        assert server.connections == 2


async def test_a_replica_that_moved_is_asked_at_its_new_address() -> None:
    async with ReplicaServer({"/": (200, b"old")}) as old, ReplicaServer({"/": (200, b"new")}) as new:
        ward = Ward(old.replica())
        async with ward.on_duty():
            await ward.heard("a")
            ward.members = [new.replica()]

            async def moved() -> bool:
                return ("a", b"new") in ward.answers

            await until(moved, "the new address is asked")


async def test_out_of_turn() -> None:
    async with ReplicaServer(PAGE) as server:
        ward = Ward(server.replica())
        ward.rounds.ask_now(server.replica())  # not on duty: no effect
        async with ward.on_duty():
            await ward.heard("a")
            ward.rounds.ask_now(server.replica())
            await ward.heard("a", 2)
    assert not ward.failures
