"""What the admin port answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from extproc.admin import fleet, page
from extproc.explain import explain

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from extproc.admin.decisions import RecentDecisions
    from extproc.admin.history import History
    from extproc.core.router import Router
    from extproc.membership import Membership
    from extproc.picker import EndpointPicker

MAX_REQUEST_BYTES: Final = 1 << 20
"""Of a request to explain. It is read on the loop that decides: 1 MiB of JSON holds it up for some 10 ms."""
SHOWN_DECISIONS: Final = 100
"""At one time, unless asked for another number."""

HEADERS: Final = (
    (b"content-security-policy", page.POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)


@dataclass(frozen=True, slots=True)
class Admin:
    """What there is to be shown, and the routes that show it."""

    picker: EndpointPicker
    membership: Membership
    decisions: RecentDecisions
    history: History
    metrics: Callable[[], bytes]

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/", self._page),
                Route("/healthz", self._healthz),
                Route("/readyz", self._readyz),
                Route("/metrics", self._metrics),
                Route("/debug/replicas", self._replicas),
                Route("/debug/decisions", self._decisions),
                Route("/debug/state", self._state),
                Route("/debug/explain", self._explain, methods=["POST"]),
            ],
            middleware=[Middleware(WithHeaders)],
        )

    @property
    def _router(self) -> Router:
        return self.picker.router

    async def _page(self, _: Request) -> Response:
        return Response(page.HTML, media_type="text/html")

    async def _healthz(self, _: Request) -> Response:
        """The process runs."""
        return PlainTextResponse("ok\n")

    async def _readyz(self, _: Request) -> Response:
        """The fleet is known, else 503."""
        return PlainTextResponse("ready\n") if self.membership.listed else PlainTextResponse("no fleet yet\n", 503)

    async def _metrics(self, _: Request) -> Response:
        """See extproc.metrics."""
        return Response(self.metrics(), media_type=CONTENT_TYPE_LATEST)

    async def _replicas(self, _: Request) -> Response:
        """See extproc.admin.fleet."""
        return _json(await fleet.replicas_text(self._router, self.membership))

    async def _decisions(self, request: Request) -> Response:
        """?n=: how many, the newest first."""
        count = _number(request, "n", SHOWN_DECISIONS)
        if count is None:
            return PlainTextResponse("n must be a number\n", 400)
        return _json(fleet.to_text(self.decisions.newest(int(count))))

    async def _state(self, request: Request) -> Response:
        """All that the page shows. ?decision=, ?step=: only what came after this decision and this step began."""
        serial, began_unix_s = _number(request, "decision", 0), _number(request, "step", 0)
        if serial is None or began_unix_s is None:
            return PlainTextResponse("decision and step must be numbers\n", 400)
        replicas = await fleet.replicas_text(self._router, self.membership)
        rest = fleet.to_text(
            {
                "router": fleet.router_json(self._router, self.membership),
                "session_header": next(iter(self.picker.feature_settings.session_headers), None),
                "last_decision": self.decisions.last_serial,
                "decisions": self.decisions.since(int(serial), SHOWN_DECISIONS),
                "steps": self.history.since(began_unix_s),
            }
        )
        return _json(f'{{"replicas":{replicas},{rest[1:]}')

    async def _explain(self, request: Request) -> Response:
        """As `extproc explain`, against this router as it is now. Nothing is routed, nothing remembered."""
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_REQUEST_BYTES:
                return PlainTextResponse(f"more than {MAX_REQUEST_BYTES} bytes\n", 413)
        try:
            document = json.loads(body)
        except (ValueError, RecursionError) as error:
            return PlainTextResponse(f"the request is no JSON: {error}\n", 400)
        return _json(fleet.to_text(explain(document, self.picker.feature_settings, self._router)))


class WithHeaders:
    """Adds `HEADERS` to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _json(text: str) -> Response:
    return Response(text, media_type="application/json")


def _number(request: Request, name: str, default: float) -> float | None:
    """None where it is no number."""
    try:
        number = float(request.query_params.get(name, default))
    except ValueError:
        return None
    return number if abs(number) < 2**53 else None  # which leaves out nan and infinity
