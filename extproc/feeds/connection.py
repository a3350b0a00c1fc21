"""A connection that asks one replica for small pages, again and again.

At 256 replicas and two looks a second this is the service's most frequent act, so it is made of a bare asyncio
protocol and llhttp (httptools, as in uvicorn): a poll of metrics costs 165 us of CPU, 300 us with aiohttp's client.
All 256 take 8% of a core with it.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

import httptools

from extproc.address import split_address

MAX_PAGE_BYTES: Final = 4 * 1024 * 1024
"""vLLM's whole metrics page is over 100 KB; one of this size is no metrics page."""


class BadAnswer(ConnectionError):
    """What came is no HTTP answer, or too long a one."""


class Page(NamedTuple):
    """An answer."""

    status: int
    body: bytes


class Connection:
    """Kept open between two questions and opened again where it was closed. One question at a time."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._address = split_address(endpoint)
        self._open: _Protocol | None = None

    async def get(self, path: str) -> Page:
        """Ask for a page. Raises OSError where there is no answer; a caller that gives up cancels."""
        kept = self._open
        if kept is not None and not kept.closed:
            try:
                return await kept.ask(path, self.endpoint)
            except BadAnswer:
                raise
            except ConnectionError:
                pass  # the replica had closed it while nobody asked: that says nothing about its health
        host, port = self._address
        _, self._open = await asyncio.get_running_loop().create_connection(_Protocol, host, port)
        return await self._open.ask(path, self.endpoint)

    def close(self) -> None:
        if self._open is not None:
            self._open.close()


class _Protocol(asyncio.Protocol):
    """One TCP connection."""

    def __init__(self) -> None:
        self.closed = False
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()
        self._page: asyncio.Future[Page] | None = None

    async def ask(self, path: str, host: str) -> Page:
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()
        self._page = asyncio.get_running_loop().create_future()
        self._transport.write(f"GET {path} HTTP/1.1\r\nhost: {host}\r\naccept: */*\r\n\r\n".encode())
        try:
            return await self._page
        except BaseException:  # an answer that may still come would be taken for that to the next question
            self.close()
            raise

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: OSError) -> None:
        if self._page is not None and not self._page.done():
            self._page.set_exception(error)

    # --- called by the transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(BadAnswer(f"not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._fail(ConnectionResetError("the connection was closed before the answer was whole"))

    # --- called by the parser ---

    def on_body(self, body: bytes) -> None:
        self._body += body
        if len(self._body) > MAX_PAGE_BYTES:
            self._fail(BadAnswer(f"longer than {MAX_PAGE_BYTES} bytes"))

    def on_message_complete(self) -> None:
        if self._page is not None and not self._page.done():
            self._page.set_result(Page(self._parser.get_status_code(), bytes(self._body)))
        if not self._parser.should_keep_alive():
            self.close()
