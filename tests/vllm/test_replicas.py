"""Real vLLM under Ray Serve: each replica by its own address, with its own prefix cache."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from demo.wait import until
from tests.support.metrics import figure
from tests.vllm.conftest import BLOCK_TOKENS, MODEL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from serve_app.cluster import RayCluster

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
def urls(vllm_fleet: RayCluster) -> list[str]:
    return [f"http://{replica.endpoint}" for replica in vllm_fleet.replicas()]


def dialogue(**rest: Any) -> dict[str, Any]:
    """A request that no other test has sent, some 700 tokens long."""
    text = f"{uuid.uuid4()} " + "Tell me about lists and dictionaries in Python. " * 40
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4, **rest}


async def ask(http: aiohttp.ClientSession, url: str, body: Any, path: str = CHAT) -> tuple[Any, Any]:
    async with http.post(url + path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json(), answer.headers


async def hits(http: aiohttp.ClientSession, url: str) -> float:
    async with http.get(f"{url}/metrics") as answer:
        return figure(await answer.text(), "vllm:prefix_cache_hits_total")


async def test_each_replica_names_itself(http: aiohttp.ClientSession, vllm_fleet: RayCluster) -> None:
    for replica in vllm_fleet.replicas():
        for method, path, body, status in [
            ("POST", CHAT, dialogue(), 200),
            ("POST", CHAT, dialogue(stream=True), 200),
            ("POST", CHAT, dialogue(model="other"), 404),
            ("GET", "/v1/models", None, 200),
            ("GET", "/health", None, 200),
            ("GET", "/metrics", None, 200),
            ("GET", "/-/healthz", None, 200),
        ]:
            async with http.request(method, f"http://{replica.endpoint}{path}", json=body) as answer:
                assert answer.status == status, path
                assert answer.headers.getall("x-replica-id") == [replica.id], path


async def test_the_next_turn_hits_on_the_same_replica_only(http: aiohttp.ClientSession, urls: list[str]) -> None:
    here, there = urls
    before = await hits(http, here), await hits(http, there)
    body = dialogue()
    answer, _ = await ask(http, here, body)
    prompt_tokens = answer["usage"]["prompt_tokens"]
    body["messages"] += [answer["choices"][0]["message"], {"role": "user", "content": "And tuples?"}]
    await ask(http, here, body)
    known = prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    assert known >= 5 * BLOCK_TOKENS
    assert await hits(http, here) - before[0] >= known
    assert await hits(http, there) - before[1] == 0
    await ask(http, there, body)
    assert await hits(http, there) - before[1] == 0, "the other replica has never seen it"


@pytest.mark.parametrize("stream", [False, True])
async def test_headers_tell_the_engines_own_counts(http: aiohttp.ClientSession, urls: list[str], stream: bool) -> None:
    body = dialogue(stream=stream) | ({"stream_options": {"include_usage": True}} if stream else {})
    for warm in (False, True):
        async with http.post(urls[0] + CHAT, json=body) as answer:
            headers = answer.headers
            text = await answer.text()
        last = text.removesuffix("data: [DONE]\n\n").strip().rpartition("data: ")[2]
        usage = json.loads(last)["usage"]
        assert int(headers["x-prompt-tokens"]) == usage["prompt_tokens"]
        cached_tokens = int(headers["x-cached-tokens"])
        assert cached_tokens == (usage["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"]
        assert cached_tokens == (usage["prompt_tokens"] // BLOCK_TOKENS * BLOCK_TOKENS if warm else 0)
        assert headers["x-queue-depth"] == "0"


async def test_several_prompts_are_summed(http: aiohttp.ClientSession, urls: list[str]) -> None:
    body = {"model": MODEL, "prompt": [[5, 6, 7], [8, 9]], "max_tokens": 1}
    answer, headers = await ask(http, urls[0], body, TEXT)
    assert int(headers["x-prompt-tokens"]) == answer["usage"]["prompt_tokens"] == 5


async def test_headers_arrive_with_the_first_token_not_before(http: aiohttp.ClientSession, urls: list[str]) -> None:
    """While a long prompt is prefilled there are no headers; when they come, the first chunk is there."""
    body = dialogue(stream=True, max_tokens=50)
    body["messages"][0]["content"] = f"{uuid.uuid4()} " + "a word or two, " * 900
    clock = asyncio.get_running_loop().time
    sent_s = clock()
    async with http.post(urls[0] + CHAT, json=body) as answer:
        headers_s = clock() - sent_s
        await answer.content.readuntil(b"\n\n")
        first_s = clock() - sent_s
        await answer.read()
    assert first_s - headers_s < 0.1 * headers_s, (headers_s, first_s)


async def test_a_client_that_leaves_aborts_its_request(http: aiohttp.ClientSession, urls: list[str]) -> None:
    async def figure_of(name: str) -> float:
        async with http.get(f"{urls[0]}/metrics") as answer:
            return figure(await answer.text(), name)

    async with http.post(urls[0] + CHAT, json=dialogue(stream=True, max_tokens=4000, ignore_eos=True)) as answer:
        await answer.content.readuntil(b"\n\n")
        assert await figure_of("vllm:num_requests_running") == 1
        answer.close()

    async def idle() -> bool:
        return await figure_of("vllm:num_requests_running") == 0

    await until(idle, "the request is aborted", 5)
