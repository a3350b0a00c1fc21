"""Which models a replica serves: it is asked once, at its own /v1/models."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import aiohttp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.core.replica import Replica
    from extproc.feeds.feed import MembershipFeed

ANSWER_TIMEOUT_S: Final = 1.0
ASK_AGAIN_AFTER: Final = 20
"""Looks between two questions to a replica that does not say: 10 s at two looks a second."""


class WithModels:
    """A feed whose replicas are asked for their models where the source does not name them.

    A replica that does not answer is taken to serve any model, and asked again later; a new one is held back until it
    was asked, since a request for another model's replica would fail.
    """

    def __init__(self, feed: MembershipFeed) -> None:
        self._feed = feed
        self._models: dict[str, frozenset[str]] = {}
        self._unasked_looks: dict[str, int] = {}
        self._session: aiohttp.ClientSession | None = None

    async def read(self) -> Sequence[Replica]:
        replicas = await self._feed.read()
        ids = {replica.id for replica in replicas}
        for gone in self._models.keys() - ids:
            del self._models[gone]
            self._unasked_looks.pop(gone, None)
        await asyncio.gather(*(self._ask(replica) for replica in replicas if not replica.models))
        return [
            replica if replica.models else replace(replica, models=self._models.get(replica.id, frozenset()))
            for replica in replicas
        ]

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        await self._feed.close()

    async def _ask(self, replica: Replica) -> None:
        if self._models.get(replica.id):
            return
        if replica.id in self._models:
            looks = self._unasked_looks[replica.id] = self._unasked_looks.get(replica.id, 0) + 1
            if looks % ASK_AGAIN_AFTER:
                return
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S))
        try:
            async with self._session.get(f"http://{replica.endpoint}{replica.route_prefix}/v1/models") as response:
                document = await response.json(content_type=None)
                names = frozenset(model["id"] for model in document["data"] if isinstance(model["id"], str))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError):
            names = frozenset()
        self._models[replica.id] = names
