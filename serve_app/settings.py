"""What can be said about an application, from Python, a Serve config file or `serve run ... key=value`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt

from serve_app.engine.core import KV_CACHE_TOKENS


def _from_json(value: Any) -> Any:
    """`serve run` passes every value as a string."""
    return json.loads(value) if isinstance(value, str) else value


JsonObject = Annotated[dict[str, Any], BeforeValidator(_from_json)]


VLLM_ON_CPU_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB per replica
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or several replicas on one machine pin the same cores
}
"""`env` of vLLM replicas on a machine without GPUs; with it goes `num_gpus=0`."""


class AppSettings(BaseModel):
    """One application: one model on a number of like replicas. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: Literal["sim", "vllm"] = "sim"
    model: str = Field(default="sim", description="vLLM: model path or hub id. sim: any name")
    served_model_name: str | None = Field(default=None, description="what requests call it; default: `model`")

    num_replicas: PositiveInt = 1
    num_cpus: float = Field(default=0.0, ge=0, description="CPUs that Ray sets aside per replica")
    num_gpus: float | None = Field(
        default=None, ge=0, description="per replica; default: sim 0, vLLM tensor_parallel_size. 0: vLLM on CPUs"
    )
    max_ongoing_requests: PositiveInt = Field(
        default=256,
        description="beyond it requests wait in Serve, unseen by the engine; so as many as vLLM runs at once "
        "(its max_num_seqs: 256 where memory allows)",
    )
    max_queued_requests: int = Field(
        default=64, ge=-1, description="waiting in Serve per replica; beyond it 503, retried elsewhere. -1: no limit"
    )
    health_check_period_s: PositiveFloat = Field(
        default=2.0, description="a failing replica left the target list after 6.7 s at this period (Serve: 10)"
    )
    graceful_shutdown_timeout_s: PositiveFloat = Field(
        default=600.0,
        description="a replica that is scaled away cuts its streams after this: above the longest generation "
        "(16,384 tokens at 25 ms take 410 s)",
    )
    otlp_traces_endpoint: str | None = Field(
        default=None,
        description="where the engines' spans go, OTLP over HTTP: http://collector:4318/v1/traces. "
        "They belong to the trace that a request's `traceparent` names",
    )
    env: JsonObject = Field(default_factory=dict, description="environment variables of the replicas")
    revision: str = Field(default="", description="read by nobody: another value rolls all replicas")

    tensor_parallel_size: PositiveInt = Field(default=1, description="vLLM: GPUs that share the model")
    engine_args: JsonObject = Field(
        default_factory=dict,
        description="vLLM: command line options without dashes, e.g. {'max_model_len': 8192, 'enforce_eager': true}",
    )

    kv_cache_tokens: PositiveInt = Field(default=KV_CACHE_TOKENS, description="sim: see engine/core.py")
    time_scale: PositiveFloat = Field(default=1.0, description="sim: factor on all durations")
    stream_interval_tokens: PositiveInt = Field(default=1, description="sim: output tokens per streamed chunk")

    @property
    def name(self) -> str:
        """The model name that requests use."""
        return self.served_model_name or self.model

    @property
    def gpus_per_replica(self) -> float:
        if self.num_gpus is not None:
            return self.num_gpus
        return self.tensor_parallel_size if self.engine == "vllm" else 0
