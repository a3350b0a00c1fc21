from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from serve_app.settings import AppSettings


def test_values_may_be_strings_as_serve_run_gives_them() -> None:
    settings = AppSettings.model_validate(
        {"num_replicas": "4", "time_scale": "0.1", "engine_args": '{"max_model_len": 8192}'}
    )
    assert (settings.num_replicas, settings.time_scale) == (4, 0.1)
    assert settings.engine_args == {"max_model_len": 8192}


@pytest.mark.parametrize("wrong", [{"replicas": 4}, {"engine": "gpt"}, {"num_replicas": 0}, {"time_scale": 0}])
def test_mistakes_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        AppSettings.model_validate(wrong)


@pytest.mark.parametrize(
    ("given", "gpus"),
    [
        ({"engine": "sim"}, 0),
        ({"engine": "vllm"}, 1),
        ({"engine": "vllm", "tensor_parallel_size": 8}, 8),
        ({"engine": "vllm", "tensor_parallel_size": 8, "num_gpus": 0}, 0),
    ],
)
def test_gpus_follow_the_tensor_parallel_size(given: dict[str, Any], gpus: float) -> None:
    assert AppSettings.model_validate(given).gpus_per_replica == gpus
