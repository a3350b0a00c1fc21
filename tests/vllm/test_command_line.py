"""Settings as vLLM's own argument parser understands them."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.settings import AppSettings

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def parsed(**settings: Any) -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser  # noqa: PLC0415  # absent elsewhere
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    from serve_app.vllm_engine import command_line  # noqa: PLC0415

    words = command_line(AppSettings(engine="vllm", **settings))
    return make_arg_parser(FlexibleArgumentParser()).parse_args(words)


def test_what_every_replica_gets() -> None:
    args = parsed(model="some/model", served_model_name="short", tensor_parallel_size=8)
    assert args.model == "some/model"
    assert args.served_model_name == ["short"]
    assert args.tensor_parallel_size == 8
    assert args.enable_prefix_caching is True
    assert args.middleware == ["serve_app.first_token.FirstTokenMiddleware"]
    assert args.otlp_traces_endpoint is None


def test_where_spans_go() -> None:
    endpoint = "http://collector.example:4318/v1/traces"
    assert parsed(model="m", otlp_traces_endpoint=endpoint).otlp_traces_endpoint == endpoint


def test_engine_args_of_every_kind() -> None:
    args = parsed(
        model="m",
        engine_args={
            "max_model_len": 8192,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "served_model_name": ["a", "b"],
        },
    )
    assert args.max_model_len == 8192
    assert args.enforce_eager is True
    assert args.enable_prefix_caching is False
    assert args.served_model_name == ["a", "b"]
