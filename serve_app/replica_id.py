"""Every response says which replica it comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.datastructures import MutableHeaders

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

REPLICA_ID_HEADER = "x-replica-id"


class ReplicaIdMiddleware:
    """Adds `x-replica-id` to each HTTP response of `app`, errors and streams included."""

    def __init__(self, app: ASGIApp, replica_id: str) -> None:
        self._app = app
        self._replica_id = replica_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REPLICA_ID_HEADER] = self._replica_id
            await send(message)

        await self._app(scope, receive, send_named if scope["type"] == "http" else send)
