"""One simulated replica without Ray: `python -m serve_app.engine --port 8001 --replica-id a`."""

from __future__ import annotations

import argparse

import uvicorn

from serve_app.engine.core import KV_CACHE_TOKENS, EngineSettings
from serve_app.engine.http import build_app
from serve_app.engine.timing import Timing


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m serve_app.engine", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--replica-id", help="value of x-replica-id (default HOST:PORT)")
    parser.add_argument("--model", default="sim", help="the model name it answers to")
    parser.add_argument("--kv-cache-tokens", type=int, default=KV_CACHE_TOKENS)
    parser.add_argument("--time-scale", type=float, default=1.0, help="0.1: ten times as fast")
    parser.add_argument("--stream-interval-tokens", type=int, default=1)
    args = parser.parse_args()
    settings = EngineSettings(
        model=args.model,
        kv_cache_tokens=args.kv_cache_tokens,
        stream_interval_tokens=args.stream_interval_tokens,
        timing=Timing().scaled(args.time_scale),
    )
    app = build_app(settings, args.replica_id or f"{args.host}:{args.port}")
    uvicorn.run(app, host=args.host, port=args.port, access_log=False, log_level="warning")


if __name__ == "__main__":
    main()
