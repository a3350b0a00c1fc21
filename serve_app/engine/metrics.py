"""/metrics of the simulated engine under the names, labels, units and buckets of vLLM 0.32.

Only what a router, an autoscaler or a dashboard reads; see vllm/v1/metrics/loggers.py for the whole list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from collections.abc import Callable

TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
LATENCY_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class EngineMetrics:
    """One engine's figures in a registry of its own, so that several engines may share a process."""

    def __init__(self, model: str, block_tokens: int, capacity_blocks: int) -> None:
        self._registry = registry = CollectorRegistry()
        names = ("model_name", "engine")
        values = (model, "0")

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, names, registry=registry).labels(*values)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, names, registry=registry).labels(*values)

        def histogram(name: str, text: str, buckets_s: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, names, registry=registry, buckets=buckets_s).labels(*values)

        self._running = gauge("vllm:num_requests_running", "Requests in prefill or decode.")
        self._waiting = gauge("vllm:num_requests_waiting", "Requests not yet scheduled.")
        self._kv_usage = gauge("vllm:kv_cache_usage_perc", "KV blocks in use by running requests, 0..1.")
        self._queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        counter("vllm:num_preemptions", "Preemptions; the simulated engine never preempts.")
        self._prompt = counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self._cached = counter("vllm:prompt_tokens_cached", "Prompt tokens that were cached.")
        by_source = Counter(
            "vllm:prompt_tokens_by_source", "Prompt tokens by source.", (*names, "source"), registry=registry
        )
        self._from_compute = by_source.labels(*values, "local_compute")
        self._from_cache = by_source.labels(*values, "local_cache_hit")
        self._generated = counter("vllm:generation_tokens", "Tokens generated.")
        success = Counter(
            "vllm:request_success",
            "Requests by how they ended.",
            (*names, "finished_reason"),
            registry=registry,
        )
        self._ended = {reason: success.labels(*values, reason) for reason in ("stop", "length", "abort")}
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS_S)
        self._queue = histogram(
            "vllm:request_queue_time_seconds", "Arrival to the start of prefill.", LATENCY_BUCKETS_S
        )
        self._latency = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", LATENCY_BUCKETS_S)
        Gauge(
            "vllm:cache_config_info",
            "The cache's configuration, as labels.",
            ("block_size", "num_gpu_blocks", "enable_prefix_caching", "engine"),
            registry=registry,
        ).labels(str(block_tokens), str(capacity_blocks), "True", "0").set(1)

    def follow(self, running: Callable[[], float], waiting: Callable[[], float], kv_usage: Callable[[], float]) -> None:
        """Read the gauges from the engine when they are scraped rather than on every change."""
        self._running.set_function(running)
        self._waiting.set_function(waiting)
        self._kv_usage.set_function(kv_usage)

    def scheduled(self, prompt_tokens: int, cached_tokens: int, queued_s: float) -> None:
        self._queries.inc(prompt_tokens)
        self._hits.inc(cached_tokens)
        self._queue.observe(queued_s)

    def first_token(self, prompt_tokens: int, cached_tokens: int, took_s: float) -> None:
        self._prompt.inc(prompt_tokens)
        self._cached.inc(cached_tokens)
        self._from_cache.inc(cached_tokens)
        self._from_compute.inc(prompt_tokens - cached_tokens)
        self._ttft.observe(took_s)

    def ended(self, reason: str, output_tokens: int, took_s: float) -> None:
        """reason: "stop", "length" or "abort", as in vLLM's finished_reason."""
        self._ended[reason].inc()
        self._generated.inc(output_tokens)
        self._latency.observe(took_s)

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)
