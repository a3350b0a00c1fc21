"""The time that one request can take of all others, and what is made of bodies that are no prompt."""

from __future__ import annotations

import gzip
import json
import threading
import time
import zlib
from typing import TYPE_CHECKING

import pytest

from extproc.core.features import FeatureSettings, extract
from extproc.core.request import Request
from tests.component.serving import Serving
from tests.hostile.bombs import BOMBS

if TYPE_CHECKING:
    from pathlib import Path

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages")
WORST_CPU_S = 0.6
"""Some 0.1 s where nothing else runs; before dense documents were read by their heads it was 2 s and more."""


@pytest.mark.parametrize("name", BOMBS)
def test_no_body_takes_long_to_read(name: str) -> None:
    worst_s = 0.0
    for path in PATHS:
        for truncated in (False, True):
            began_s = time.thread_time()
            extract(Request("POST", path, {}, BOMBS[name], truncated), FeatureSettings())
            worst_s = max(worst_s, time.thread_time() - began_s)
    print(f"{name}: {worst_s * 1000:.0f} ms of CPU at worst")
    assert worst_s < WORST_CPU_S


def test_others_are_answered_while_bombs_are_read(tmp_path: Path) -> None:
    """The router is one event loop: what it spends on one request, everybody waits for."""
    with Serving(tmp_path) as router:
        router.fleet("127.0.0.1:1", "127.0.0.1:2")
        router.wait_for("ready")
        thrown = threading.Thread(target=lambda: [router.route(body) for body in BOMBS.values()])
        thrown.start()
        waits_s = []
        while thrown.is_alive():
            began_s = time.monotonic()
            assert router.route(**{"x-session-id": "other"}) is not None
            waits_s.append(time.monotonic() - began_s)
        thrown.join()
        print(f"{len(waits_s)} requests beside {len(BOMBS)} bombs: the longest took {max(waits_s) * 1000:.0f} ms")
        assert len(waits_s) > len(BOMBS)
        assert max(waits_s) < 1.5
        assert router.route(b"{}") is not None


CHAT = {"model": "m", "messages": [{"role": "system", "content": "s" * 3000}, {"role": "user", "content": "hello"}]}
PLAIN = json.dumps(CHAT).encode()


@pytest.mark.parametrize(
    "body",
    [gzip.compress(PLAIN), zlib.compress(PLAIN), b"\xff" + PLAIN, b"\x00" + PLAIN, PLAIN[:-1] + b"\xff}"],
    ids=["gzip", "deflate", "not UTF-8", "NUL", "not UTF-8 at the end"],
)
def test_a_body_that_cannot_be_read_has_no_affinity_but_its_session(body: bytes) -> None:
    features = extract(Request("POST", PATHS[0], {"x-session-id": "s"}, body), FeatureSettings())
    assert features.conversation_source == "header:x-session-id"
    assert features.rungs == ()
    assert extract(Request("POST", PATHS[0], {}, body), FeatureSettings()).conversation_key is None


def test_a_prompt_that_is_too_dense_to_read_whole_keeps_its_opening() -> None:
    """The head decides, as where the data plane shows no more than a head."""
    opening = CHAT["messages"]
    sparse = json.dumps({"messages": opening}).encode()
    dense = json.dumps({"messages": [*opening, *[{}] * 2_000_000]}).encode()  # type: ignore[misc]
    whole, head = (extract(Request("POST", PATHS[0], {}, body), FeatureSettings()) for body in (sparse, dense))
    assert head.conversation_key == whole.conversation_key is not None
    assert head.system_rung == whole.system_rung is not None
    assert head.truncated and not whole.truncated
    assert head.prompt_bytes > 1 << 20  # what was not read is taken for prompt, up to a limit


def test_200k_token_ids_and_4_mib_of_prose_are_read_whole() -> None:
    ids = json.dumps({"prompt": list(range(200_000)), "session_id": "s"}).encode()
    prose = json.dumps({"prompt": "Well, no comma is too many, says the editor. " * 90_000, "session_id": "s"}).encode()
    for body in (ids, prose):
        features = extract(Request("POST", PATHS[1], {}, body), FeatureSettings())
        assert features.conversation_source == "body:session_id"
        assert not features.truncated
