"""The link between two processes: order, pieces, sockets, ends."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from demo.wait import until
from extproc.workers.link import LATER_S, Link

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from extproc.workers.link import Message

SMALL_BUFFER_BYTES = 4096


@pytest_asyncio.fixture
async def ends() -> AsyncIterator[tuple[Link, Link]]:
    one, other = socket.socketpair()
    for end in (one, other):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER_BYTES)
    links = Link(one, nothing), Link(other, nothing)
    yield links
    for link in links:
        link.close()


def nothing() -> None:
    """These tests look for themselves."""


async def everything(link: Link, count: int) -> list[Message]:
    """Wait for so many messages."""
    taken: list[Message] = []

    async def arrived() -> bool:
        taken.extend(link.take())
        return len(taken) >= count

    await until(arrived, f"{count} messages")
    return taken


async def test_values_arrive_as_they_were_sent(ends: tuple[Link, Link]) -> None:
    one, other = ends
    message = (
        3,
        None,
        True,
        1.5,
        "\ud800 text",
        b"\x00bytes",
        ("a", (1, b"x")),
        [1, 2],
        frozenset({"10.0.0.1:1"}),
        {"a": 1},
    )
    one.post(message)
    assert await everything(other, 1) == [message]


async def test_more_than_the_kernel_holds_arrives_whole_and_in_order(ends: tuple[Link, Link]) -> None:
    one, other = ends
    sent = [(number, bytes([number % 256]) * number * 2) for number in range(300)]
    for message in sent:
        one.post(message)
    assert await everything(other, len(sent)) == sent


@pytest.mark.parametrize("piece", [1, 3, 7])
async def test_a_message_in_pieces_is_one_message(piece: int) -> None:
    writer, reader = socket.socketpair()
    recorder, written = socket.socketpair()
    with writer, written:
        recording = Link(recorder, nothing)
        recording.post((1, "word" * 10))
        await asyncio.sleep(0)
        recording.close()
        frame = written.recv(1000)
        link, taken = Link(reader, nothing), list[object]()
        for at in range(0, len(frame), piece):
            assert not taken
            writer.sendall(frame[at : at + piece])
            taken += link.take()
        assert taken == [(1, "word" * 10)]
        link.close()


async def test_sockets_travel_with_their_messages(ends: tuple[Link, Link]) -> None:
    """Also where the kernel is full, and other messages go before, between and behind."""
    one, other = ends
    filling = (0, b"x" * 20_000)
    ours = []
    for number in range(5):
        near, far = socket.socketpair()
        ours.append(near)
        one.post(filling)
        one.post((1, number), far)
        one.post(filling)
    numbers = [message[1] for message in await everything(other, 15) if message[0] == 1]
    assert numbers == [0, 1, 2, 3, 4]
    for number, near in enumerate(ours):
        received = other.socket()
        assert received is not None
        with near, received:
            received.sendall(b"%d" % number)
            assert near.recv(10) == b"%d" % number


async def test_a_socket_that_did_not_arrive_is_none_and_loses_no_message(ends: tuple[Link, Link]) -> None:
    """So it is where this process has no descriptor left: the kernel closes what it can't hand over."""
    one, other = ends
    one.post((1,))
    one.post((2,))
    assert await everything(other, 2) == [(1,), (2,)]
    assert other.socket() is None


async def test_what_can_wait_keeps_its_place(ends: tuple[Link, Link]) -> None:
    one, other = ends
    one.post_later((1,))
    one.post((2,))
    one.post_later((3,))
    await asyncio.sleep(0)
    assert other.take() == [(1,), (2,), (3,)], "one system call for all"
    one.post_later((4,))
    await asyncio.sleep(0)
    assert other.take() == []
    assert await everything(other, 1) == [(4,)]


async def test_a_socket_that_was_given_away_is_closed_here(ends: tuple[Link, Link]) -> None:
    one, other = ends
    near, far = socket.socketpair()
    one.post((1,), far)
    await everything(other, 1)
    assert far.fileno() == -1
    other.close()  # with the socket still in it
    with near:
        assert near.recv(1) == b""


async def test_the_end_comes_after_all_that_was_said(ends: tuple[Link, Link]) -> None:
    one, other = ends
    one.post((1,))
    one.post((2,))
    await asyncio.sleep(0)
    one.close()
    assert await everything(other, 2) == [(1,), (2,)]
    assert other.take() == []
    assert other.ended
    near, far = socket.socketpair()
    other.post((3,), far)  # to nobody
    with near:
        assert near.recv(1) == b""
    other.post_later((4,))
    await asyncio.sleep(2 * LATER_S)
