"""What the middleware does to the order of ASGI messages; tests/vllm has it in a real vLLM server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from serve_app.first_token import FirstTokenMiddleware

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

START: dict[str, Any] = {"type": "http.response.start", "status": 200, "headers": []}


def body(data: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def pass_through(messages: list[dict[str, Any]], method: str = "POST") -> list[list[str]]:
    """What the client has got after each message of the app."""
    sent: list[str] = []
    after_each: list[list[str]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(dict(message))
            after_each.append(list(sent))

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append("start" if message["type"] == "http.response.start" else message["body"].decode())

    await FirstTokenMiddleware(app)({"type": "http", "method": method}, receive, send)
    return after_each


@pytest.mark.parametrize(
    ("messages", "after_each"),
    [
        ([START, body(b"a"), body(b"b", False)], [[], ["start", "a"], ["start", "a", "b"]]),
        ([START, body(b""), body(b"a", False)], [[], [], ["start", "a"]]),
        ([START, body(b"", False)], [[], ["start", ""]]),
        ([START, body(b"whole", False)], [[], ["start", "whole"]]),
        (
            [START, body(b"a"), body(b""), body(b"b", False)],
            [[], ["start", "a"], ["start", "a", ""], ["start", "a", "", "b"]],
        ),
    ],
)
async def test_the_start_waits_for_the_first_chunk(messages: list[dict[str, Any]], after_each: list[list[str]]) -> None:
    assert await pass_through(messages) == after_each


async def test_other_methods_are_left_alone() -> None:
    assert await pass_through([START, body(b"", False)], "GET") == [["start"], ["start", ""]]
