"""One kept-alive connection against a real server."""

from __future__ import annotations

import asyncio

import pytest

from demo.ports import free_port
from demo.wait import until
from extproc.feeds.connection import MAX_PAGE_BYTES, BadAnswer, Connection, Page
from tests.feeds.replica_server import ReplicaServer

HELLO = {"/hello": (200, b"hello")}


async def test_questions_share_one_connection() -> None:
    async with ReplicaServer(HELLO) as server:
        connection = Connection(server.endpoint)
        assert [await connection.get("/hello") for _ in range(3)] == [Page(200, b"hello")] * 3
        assert await connection.get("/other") == Page(404, b"not found")
        assert server.connections == 1
        connection.close()


async def test_a_long_page_arrives_whole() -> None:
    page = b"x" * (1 << 20)
    async with ReplicaServer({"/": (200, page)}) as server:
        connection = Connection(server.endpoint)
        assert (await connection.get("/")).body == page
        connection.close()


async def test_a_chunked_page_arrives_whole() -> None:
    raw = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    async with ReplicaServer(raw=raw) as server:
        connection = Connection(server.endpoint)
        assert [await connection.get("/") for _ in range(2)] == [Page(200, b"abcde")] * 2
        connection.close()


async def test_a_connection_that_was_closed_between_two_questions_is_no_failure() -> None:
    async with ReplicaServer(HELLO, close_after_answer=True) as server:
        connection = Connection(server.endpoint)
        for _ in range(5):
            assert await connection.get("/hello") == Page(200, b"hello")
        assert server.connections == 5
        connection.close()


async def test_a_server_that_says_close_is_believed() -> None:
    async with ReplicaServer(raw=b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok") as server:
        connection = Connection(server.endpoint)
        assert [(await connection.get("/")).body for _ in range(2)] == [b"ok", b"ok"]
        assert server.connections == 2
        connection.close()


async def test_a_refused_connection_is_an_os_error() -> None:
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await Connection(f"127.0.0.1:{free_port()}").get("/")


@pytest.mark.parametrize(
    "raw",
    [
        b"<html>no HTTP</html>\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (MAX_PAGE_BYTES + 1) + b"x" * (MAX_PAGE_BYTES + 1),
    ],
    ids=["not HTTP", "too long"],
)
async def test_an_answer_that_is_none_is_an_os_error(raw: bytes) -> None:
    async with ReplicaServer(raw=raw) as server:
        with pytest.raises(BadAnswer):
            await Connection(server.endpoint).get("/")


async def test_an_answer_that_comes_late_is_not_taken_for_the_next() -> None:
    async with ReplicaServer(HELLO, hang=True) as server:
        connection = Connection(server.endpoint)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connection.get("/late")
        server.hang = False
        assert await connection.get("/hello") == Page(200, b"hello")
        assert server.connections == 2
        connection.close()


async def test_a_server_that_dies_in_the_middle_is_an_os_error() -> None:
    server = ReplicaServer(hang=True)
    async with server:
        asking = asyncio.create_task(Connection(server.endpoint).get("/"))

        async def asked() -> bool:
            return bool(server.asked)

        await until(asked, "the question is there")
    with pytest.raises(OSError):
        await asking
