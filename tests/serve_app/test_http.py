"""The OpenAI face over real HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from demo.wait import until
from tests.serve_app.conftest import MODEL, TIME_SCALE
from tests.support.metrics import figure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
async def http(replica: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(replica) as session:
        yield session


def question(text: str, **rest: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **rest}


async def post(http: aiohttp.ClientSession, path: str, body: Any) -> tuple[Any, Any]:
    async with http.post(path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json(), answer.headers


async def events(answer: aiohttp.ClientResponse) -> list[Any]:
    """All events of a stream, [DONE] checked and left out."""
    lines = [line.removeprefix("data: ") for line in (await answer.text()).split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def metrics(http: aiohttp.ClientSession) -> str:
    async with http.get("/metrics") as answer:
        return await answer.text()


async def test_a_dialogue_hits_what_it_said_before(http: aiohttp.ClientSession) -> None:
    first = question("tell me a story. " * 40, max_tokens=20)
    answer, headers = await post(http, CHAT, first)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    # marker 2 + 680 characters 170 + end 1 + marker 3 = 176 tokens
    assert answer["usage"]["prompt_tokens"] == int(headers["x-prompt-tokens"]) == 176

    first["messages"] += [choice["message"], {"role": "user", "content": "and then?"}]
    answer, headers = await post(http, CHAT, first)
    # Known: 176 + 19 of the answer's 20 tokens = 195, of which 12 whole blocks = 192.
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
    assert headers["x-cached-tokens"] == "192"
    assert headers["x-queue-depth"] == "0"


async def test_a_stream_carries_the_same_text_chunk_by_chunk(http: aiohttp.ClientSession) -> None:
    body = question("stream, please", max_tokens=6)
    whole, _ = await post(http, CHAT, body)
    async with http.post(CHAT, json={**body, "stream": True, "stream_options": {"include_usage": True}}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-prompt-tokens"] == str(whole["usage"]["prompt_tokens"])
        chunks = await events(answer)
    *chunks, last = chunks
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta["content"] for delta in deltas) == whole["choices"][0]["message"]["content"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["length"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6


async def test_headers_mean_first_token_and_tokens_follow_at_the_pace_of_decoding(
    http: aiohttp.ClientSession,
) -> None:
    body = question("w" * 16384, max_tokens=20, stream=True)
    sent_s = time.monotonic()
    async with http.post(CHAT, json=body) as answer:
        headers_s = time.monotonic() - sent_s
        await answer.content.readuntil(b"\n\n")
        first_s = time.monotonic() - sent_s
        await answer.read()
        whole_s = time.monotonic() - sent_s
    assert headers_s >= 0.400 * TIME_SCALE
    assert first_s - headers_s < 0.05
    assert whole_s - first_s >= 0.9 * 19 * 0.025 * TIME_SCALE


@pytest.mark.parametrize(
    ("prompt", "choices", "tokens"),
    [("hi", 1, 1), (["hi", "there"], 2, 3), ([1, 2, 3], 1, 3), ([[1, 2], [3], [4]], 3, 4)],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_shape_of_a_completion_prompt(
    http: aiohttp.ClientSession, prompt: Any, choices: int, tokens: int, stream: bool
) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "stream": stream}
    if not stream:
        answer, headers = await post(http, TEXT, body)
        assert [choice["index"] for choice in answer["choices"]] == list(range(choices))
        assert all(len(choice["text"]) == 8 for choice in answer["choices"])
        assert answer["usage"]["prompt_tokens"] == int(headers["x-prompt-tokens"]) == tokens
        return
    async with http.post(TEXT, json={**body, "stream_options": {"include_usage": True}}) as response:
        *chunks, usage = await events(response)
    assert len(chunks) == 2 * choices
    assert {chunk["choices"][0]["index"] for chunk in chunks} == set(range(choices))
    assert usage["usage"]["prompt_tokens"] == tokens


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, b"{", 400),
        (CHAT, b"", 400),
        (CHAT, b"[]", 400),
        (CHAT, b"[" * 100_000, 400),
        (CHAT, b"{}", 400),
        (CHAT, b'{"messages": "hi"}', 400),
        (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0.5}', 400),
        (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1000000}', 400),
        (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "n": 2}', 400),
        (CHAT, b'{"model": "other", "messages": [{"role": "user", "content": "x"}]}', 404),
        (TEXT, b'{"prompt": {}}', 400),
        ("/v1/nothing", b"{}", 404),
    ],
)
async def test_bad_requests_get_openai_errors(http: aiohttp.ClientSession, path: str, body: bytes, status: int) -> None:
    async with http.post(path, data=body) as answer:
        assert answer.status == status
        assert answer.headers["x-replica-id"] == "one"
        error = (await answer.json())["error"]
    assert error["code"] == status
    assert error["message"]


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", CHAT, "/nothing"])
async def test_every_answer_names_its_replica(http: aiohttp.ClientSession, path: str) -> None:
    async with http.get(path) as answer:
        assert answer.headers.getall("x-replica-id") == ["one"]


async def test_models_lists_the_one_model(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/models") as answer:
        [card] = (await answer.json())["data"]
    assert card["id"] == MODEL
    assert card["max_model_len"] == 100_000


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_its_request(http: aiohttp.ClientSession, stream: bool) -> None:
    before = figure(await metrics(http), "vllm:request_success_total", finished_reason="abort")
    request = asyncio.create_task(post(http, CHAT, question(f"leave {stream}", max_tokens=50_000, stream=stream)))

    async def running() -> float:
        return figure(await metrics(http), "vllm:num_requests_running")

    await until(running, "the request runs")
    request.cancel()

    async def aborted() -> bool:
        text = await metrics(http)
        return figure(text, "vllm:request_success_total", finished_reason="abort") == before + 1

    await until(aborted, "the request is aborted")
    assert await running() == 0


async def test_metrics_have_the_labels_of_vllm(http: aiohttp.ClientSession) -> None:
    text = await metrics(http)
    labels = {"engine": "0", "model_name": MODEL}
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:prompt_tokens_cached_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket",
    ):
        figure(text, name, **labels)
    assert figure(text, "vllm:cache_config_info", block_size="16", num_gpu_blocks="6250", engine="0") == 1
