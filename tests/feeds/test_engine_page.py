"""One page of engine metrics: what is read of it, and which are not believed."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from demo.ports import free_port
from demo.process import Process
from extproc.core.replica import EngineLoad
from extproc.feeds.engine_metrics import BadPage, parse

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

CACHE = {
    "block_size": "16",
    "cache_dtype": "auto",
    "effective_attention_block_size": "16",
    "hash_block_size": "16",
    "kv_cache_size_tokens": "400000",
    "mamba_block_size": "None",
    "num_cpu_blocks": "None",
    "num_gpu_blocks": "25000",
    "num_gpu_blocks_override": "None",
    "user_specified_block_size": "False",
    "_block_size_resolved": "True",
}


def page(*engines: Mapping[str, float], cache: Mapping[str, str] | None = None) -> bytes:
    """As vLLM 0.32 writes it, with each engine's figures by family; the families around them come along."""
    registry = CollectorRegistry()
    labels = ("model_name", "engine")
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    counters = ("prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_queries", "mm_cache_hits")
    families = {
        **{name: Gauge(f"vllm:{name}", f"{name} is vllm:{name}", labels, registry=registry) for name in gauges},
        **{name: Counter(f"vllm:{name}", "in tokens", labels, registry=registry) for name in counters},
    }
    reasons = Gauge("vllm:num_requests_waiting_by_reason", "why", (*labels, "reason"), registry=registry)
    info = Gauge("vllm:cache_config_info", "CacheConfig", (*(cache or CACHE), "engine"), registry=registry)
    for number, engine in enumerate(engines):
        values = ('org/m{7}="x" 5', str(number))
        reasons.labels(*values, "capacity").set(77)
        families["external_prefix_cache_queries"].labels(*values).inc(10**6)
        info.labels(*(cache or CACHE).values(), str(number)).set(1)
        for name, value in engine.items():
            if name in gauges:
                families[name].labels(*values).set(value)
            else:
                families[name].labels(*values).inc(value)
    return generate_latest(registry)


ENGINE = {
    "num_requests_running": 3,
    "num_requests_waiting": 2,
    "kv_cache_usage_perc": 0.25,
    "prefix_cache_queries": 1000,
    "prefix_cache_hits": 600,
}
OTHER = {
    "num_requests_running": 1,
    "num_requests_waiting": 0,
    "kv_cache_usage_perc": 0.75,
    "prefix_cache_queries": 500,
    "prefix_cache_hits": 0,
}


def test_a_page_of_one_engine() -> None:
    assert parse(page(ENGINE)) == EngineLoad(
        running=3,
        waiting=2,
        kv_usage=0.25,
        capacity_tokens=400_000,
        prompt_tokens_computed=400,
        prompt_tokens_cached=600,
    )


def test_data_parallel_engines_behind_one_port_count_together() -> None:
    """Each line of the cache's configuration has that engine's tokens, but the blocks of all."""
    summed = CACHE | {"num_gpu_blocks": "50000"}
    assert parse(page(ENGINE, OTHER, cache=summed)) == EngineLoad(
        running=4,
        waiting=2,
        kv_usage=0.5,
        capacity_tokens=800_000,
        prompt_tokens_computed=900,
        prompt_tokens_cached=600,
    )


@pytest.mark.parametrize(
    ("changed", "tokens_of_two"),
    [
        ({"kv_cache_size_tokens": "123456"}, 246_912),
        ({"kv_cache_size_tokens": "None"}, 400_000),
        ({"kv_cache_size_tokens": "None", "num_gpu_blocks": "None"}, None),
        ({"kv_cache_size_tokens": "None", "block_size": "None"}, None),
        ({"kv_cache_size_tokens": "0", "num_gpu_blocks": "0"}, None),
    ],
)
def test_the_size_of_the_cache(changed: Mapping[str, str], tokens_of_two: int | None) -> None:
    assert parse(page(ENGINE, OTHER, cache=CACHE | changed)).capacity_tokens == tokens_of_two


def test_an_engine_that_says_only_how_many_requests_it_has() -> None:
    bare = b"vllm:num_requests_running 4\nvllm:num_requests_waiting 1.0 1700000000000"
    assert parse(bare) == EngineLoad(running=4, waiting=1)


@pytest.mark.parametrize("family", ENGINE)
@pytest.mark.parametrize("value", ["NaN", "-1.0", "-0.5", "+Inf", "-Inf", "1e300", "many", ""])
def test_a_figure_that_cannot_be_makes_the_page_unbelievable(family: str, value: str) -> None:
    lines = page(ENGINE).decode().splitlines(keepends=True)
    (at,) = [n for n, line in enumerate(lines) if re.match(rf"vllm:{family}(_total)?{{", line)]
    lines[at] = lines[at][: lines[at].rindex(" ") + 1] + value + "\n"
    with pytest.raises(BadPage, match=family):
        parse("".join(lines).encode())


@pytest.mark.parametrize(
    ("figures", "why"),
    [
        ({"prefix_cache_hits": 1001}, "more prefix cache hits than queries"),
        ({"kv_cache_usage_perc": 1.5}, "kv_cache_usage_perc"),
        ({"num_requests_running": 2_000_000}, "num_requests_running"),
    ],
)
def test_figures_that_contradict_themselves(figures: Mapping[str, float], why: str) -> None:
    with pytest.raises(BadPage, match=why):
        parse(page({**ENGINE, **figures}))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n\n",
        b"\x00\xff" * 1000,
        b"<html><body>Sign in to see vllm:num_requests_running 1</body></html>",
        b"# HELP vllm:num_requests_running 3\n# TYPE vllm:num_requests_waiting 3\n",
        b"vllm:num_requests_running 1\n",
        b"vllm:num_requests_running_by_reason 1\nvllm:num_requests_waiting 1\n",
        b'{"error": "vllm:num_requests_running"}',
        b"vllm:num_requests_running{",
    ],
)
def test_what_is_no_engines_page(content: bytes) -> None:
    with pytest.raises(BadPage):
        parse(content)


@given(st.binary(max_size=200), st.integers(0, 2000))
def test_a_damaged_page_is_read_or_refused_but_never_breaks(junk: bytes, at: int) -> None:
    """Whatever is read stays within what can be."""
    whole = page(ENGINE, OTHER)
    try:
        load = parse(whole[:at] + junk + whole[at:])
    except BadPage:
        return
    assert load.running >= 0
    assert load.waiting >= 0
    assert load.kv_usage is None or 0 <= load.kv_usage <= 1


def test_the_simulated_engine_is_read_as_vllm_is(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "serve_app.engine", "--port", str(port), "--time-scale", "0.01"]

    def load() -> EngineLoad | None:
        try:
            return parse(urlopen(f"{url}/metrics", timeout=5).read())
        except URLError:
            return None

    with Process([*command, "--kv-cache-tokens", "100000"], tmp_path / "engine.log") as engine:
        engine.wait_ready(load, "the engine answers")
        assert load() == EngineLoad(0, 0, 0.0, 100_000, 0, 0)
        body = json.dumps({"prompt": "x" * 4 * 4096, "max_tokens": 1}).encode()
        for _ in range(2):
            request = Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
            urlopen(request, timeout=10).read()
        assert load() == EngineLoad(0, 0, 0.0, 100_000, 4096 + 16, 4096 - 16)
