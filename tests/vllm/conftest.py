from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from serve_app.cluster import RayCluster
from serve_app.settings import VLLM_ON_CPU_ENV, AppSettings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODEL = "tiny"
BLOCK_TOKENS = 128
"""vLLM's block size on CPUs: only whole blocks hit, so prompts have to be long."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In a process of its own: torch stays out of the tests'."""
    directory = tmp_path_factory.mktemp("tiny-model")
    subprocess.run([sys.executable, "-m", "serve_app.tiny_model", directory], check=True)
    return directory


def vllm_settings(model: Path, **settings: Any) -> AppSettings:
    """An application of real vLLM on the CPU; about 3 GB of memory per replica."""
    return AppSettings(
        engine="vllm",
        model=str(model),
        served_model_name=MODEL,
        num_gpus=0,
        engine_args={"max_model_len": 8192, "enforce_eager": True},
        env={**VLLM_ON_CPU_ENV, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        **settings,
    )


@pytest.fixture(scope="session")
def vllm_fleet(tiny_model: Path) -> Iterator[RayCluster]:
    """Two replicas of real vLLM on the CPU, each on a port of its own (`vllm_fleet.replicas()`).

    Up in one to two minutes.
    """
    with RayCluster.start(min_draining_s=1.0) as cluster:
        cluster.deploy(
            vllm_settings(tiny_model, num_replicas=2),
            timeout_s=400,
        )
        yield cluster
