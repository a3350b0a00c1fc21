"""What a client writes comes back in no header, no log and no span, however it is written."""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from demo.ports import free_port
from tests.component.serving import Serving, messages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse


SECRET = "tell-nobody"
LONGEST_LINE = 4000
"""Of the log: a span with all its attributes has some 1,500 characters."""

HOSTILE: dict[str, dict[str, str]] = {
    "a session of 100 KB": {"x-session-id": SECRET * 9000},
    "a header that would begin another": {"x-session-id": f"{SECRET}\r\nx-evil: 1"},
    "NUL": {"x-session-id": f"{SECRET}\0"},
    "an escape sequence of terminals": {"x-session-id": f"\x1b[31m{SECRET}"},
    "a credential": {"authorization": f"Bearer {SECRET}"},
    "a tenant": {"x-tenant-id": SECRET},
    "a query": {":path": f"/v1/chat/completions?api_key={SECRET}"},
    "a trace that is none": {"traceparent": f"00-{SECRET}-01", "tracestate": SECRET},
    "a length that is none": {"content-length": f"{SECRET}9"},
}
BODIES: dict[str, Any] = {
    "a session": {"session_id": SECRET},
    "a session that is an object": {"conversation": {"id": SECRET}},
    "a prompt": {"messages": [{"role": "user", "content": SECRET}]},
    "a role": {"messages": [{"role": SECRET, "content": "x"}]},
    "a tool": {"tools": [{"name": SECRET}]},
    "a salt": {"cache_salt": SECRET},
}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """With spans on standard output, which goes where the log goes, and an admin port."""
    sections = {"telemetry": {"exporter": "console"}, "admin": {"listen": f"127.0.0.1:{free_port()}"}}
    with Serving(tmp_path_factory.mktemp("echo"), sections) as running:
        running.fleet("127.0.0.1:1", "127.0.0.1:2")
        running.wait_for("ready")
        yield running


def spans(router: Serving) -> list[dict[str, Any]]:
    return [json.loads(line) for line in router.lines() if '"name": "route"' in line]


def ask(router: Serving, body: bytes, headers: dict[str, str]) -> list[ProcessingResponse]:
    """The replies, once the span has been written, too."""
    before = len(spans(router))
    replies = list(router.process(iter(messages(body, headers))))
    router.wait_ready(lambda: len(spans(router)) > before, "the request's span")
    return replies


def said(router: Serving) -> str:
    """All that anybody could read."""
    listen = router.sections["admin"]["listen"]
    pages = []
    for path in ("/metrics", "/debug/decisions", "/debug/replicas", "/debug/state"):
        with urllib.request.urlopen(f"http://{listen}{path}", timeout=10) as page:
            pages.append(page.read().decode())
    return router.log() + "".join(pages)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_header_comes_back_nowhere(router: Serving, name: str) -> None:
    replies = ask(router, b"{}", HOSTILE[name])
    assert "envoy.lb" in replies[-1].dynamic_metadata
    assert SECRET not in "".join(map(str, replies))
    assert SECRET not in said(router)


@pytest.mark.parametrize("name", BODIES)
def test_a_body_comes_back_nowhere(router: Serving, name: str) -> None:
    replies = ask(router, json.dumps({"model": "m", **BODIES[name]}).encode(), {})
    assert "envoy.lb" in replies[-1].dynamic_metadata
    assert SECRET not in "".join(map(str, replies))
    assert SECRET not in said(router)


@pytest.mark.parametrize("model", ["m" * 1_000_000, "\ud800", 'a"\n{"event": "forged"}', "\x1b[2J", 10**300, ["m"]])
def test_a_model_is_shown_short_and_on_one_line(router: Serving, model: object) -> None:
    lines = len(router.log().splitlines())
    ask(router, json.dumps({"model": model}).encode(), {})
    new = router.log().splitlines()[lines:]
    assert all(json.loads(line).get("event") != "forged" for line in new)
    assert max(map(len, new)) < LONGEST_LINE
    assert "\x1b" not in said(router)
    assert max(map(len, said(router).splitlines())) < 100 * LONGEST_LINE


@pytest.mark.parametrize("key", [":method", ":path"])
def test_method_and_path_are_shown_short(router: Serving, key: str) -> None:
    ask(router, b"", {key: "/" + "p" * 60_000})
    assert max(map(len, router.log().splitlines())) < LONGEST_LINE
