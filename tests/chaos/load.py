"""A steady closed-loop load: dialogues with streamed answers, and a record of each of them."""

from __future__ import annotations

import asyncio
import itertools
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from time import monotonic
from typing import TYPE_CHECKING

import aiohttp

from demo.wait import until
from tests.support.client import CHAT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CLIENTS = 8
SESSIONS_PER_CLIENT = 2
ANSWER_TOKENS = 8
PATIENCE_S = 30.0
BROKEN_OFF = (
    b"before headers. reset reason: protocol error",
    b"before headers. reset reason: connection termination",
)
"""How Envoy's own 502 (ended within a chunk) or 503 (connection reset) ends where an answer broke off while its headers
waited for the router: for a millisecond or two it has begun, so it is not tried again, and the client has seen nothing.
One that had not begun is tried again and does not end so, while two other replicas live."""


class Outcome(StrEnum):
    """What became of a request.

    A cut answer had begun: the client has its headers, if no more, or Envoy still held them (see BROKEN_OFF).
    """

    WHOLE = "whole"
    CUT = "cut"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and its answer. Times: monotonic seconds. replica: who says that it answered, "" where nobody."""

    session: str
    began_s: float
    ended_s: float
    outcome: Outcome
    replica: str
    detail: str = ""


@dataclass
class Load:
    """What has been asked and answered so far, in the order of the ends.

    under_way: session -> the replica that has begun to answer it.
    """

    url: str
    exchanges: list[Exchange] = field(default_factory=list)
    under_way: dict[str, str] = field(default_factory=dict)

    def homes(self) -> dict[str, str]:
        """Session -> the replica that answered it last."""
        return {each.session: each.replica for each in self.exchanges if each.outcome is Outcome.WHOLE}

    async def rounds(self, count: int, timeout_s: float = 60.0) -> None:
        """Wait until each session has been asked and answered so many more times."""
        since_s = monotonic()
        sessions = CLIENTS * SESSIONS_PER_CLIENT

        async def asked() -> bool:
            times = [exchange.session for exchange in self.exchanges if exchange.began_s >= since_s]
            return len(set(times)) == sessions and min(map(times.count, set(times))) >= count

        await until(asked, f"{count} answers in each of {sessions} sessions", timeout_s)

    async def answering(self, replica: str) -> None:
        """Wait until an answer of this replica has begun."""

        async def begun() -> bool:
            return replica in self.under_way.values()

        await until(begun, f"{replica} is answering")

    async def _ask(self, client: aiohttp.ClientSession, session: str, turn: int) -> None:
        body = {
            "model": "sim",
            "stream": True,
            "max_tokens": ANSWER_TOKENS,
            "messages": [{"role": "user", "content": f"{session}, a talk of its own, turn {turn}"}],
        }
        began_s, replica, content, begun = monotonic(), "", b"", False
        try:
            async with client.post(
                self.url + CHAT,
                data=json.dumps(body),
                headers={"content-type": "application/json", "x-session-id": session},
            ) as response:
                replica = response.headers.get("x-replica-id", "")
                begun = response.status == 200 and bool(replica)
                async for chunk in response.content.iter_any():
                    content += chunk
                    self.under_way[session] = replica
                whole = response.status == 200 and content.endswith(b"data: [DONE]\n\n")
                begun = begun or (response.status in {502, 503} and content.endswith(BROKEN_OFF))
                detail = "" if whole else f"{response.status} {content[-100:]!r}"
        except (aiohttp.ClientError, TimeoutError) as error:
            whole, detail = False, f"after {len(content)} bytes: {type(error).__name__} {error}"
        self.under_way.pop(session, None)
        outcome = Outcome.WHOLE if whole else Outcome.CUT if begun else Outcome.FAILED
        self.exchanges.append(Exchange(session, began_s, monotonic(), outcome, replica, detail))

    async def talk(self, number: int, ended: asyncio.Event) -> None:
        """One client: its sessions in turn, each request as soon as the one before is answered."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as client:
            for turn in itertools.count():
                for dialogue in range(SESSIONS_PER_CLIENT):
                    if ended.is_set():
                        return
                    await self._ask(client, f"client-{number}-dialogue-{dialogue}", turn)


@asynccontextmanager
async def steady_load(url: str) -> AsyncIterator[Load]:
    """The load while the block runs; requests under way at its end are waited for."""
    load, ended = Load(url), asyncio.Event()
    talks = [asyncio.create_task(load.talk(number, ended)) for number in range(CLIENTS)]
    try:
        yield load
    finally:
        ended.set()
        await asyncio.gather(*talks)
