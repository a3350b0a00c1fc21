"""A real vLLM replica: the engine client and vLLM's own OpenAI app, inside a Ray Serve replica.

Import it only where vLLM is installed. Names as in vLLM 0.32.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from serve_app.first_token import FirstTokenMiddleware
from serve_app.replica_id import ReplicaIdMiddleware

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from serve_app.settings import AppSettings


class VllmServer:
    def __init__(self, settings: AppSettings) -> None:
        self._settings = settings
        self._engine: Any = None
        self._running = AsyncExitStack()

    async def start(self, replica_id: str) -> ASGIApp:
        """Load the model and return vLLM's app; raises whatever vLLM raises when it can't."""
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(command_line(self._settings))
        validate_parsed_serve_args(args)
        self._engine = await self._running.enter_async_context(build_async_engine_client(args))
        tasks = await self._engine.get_supported_tasks()
        app = build_app(args, tasks, self._engine.model_config)
        await init_app_state(self._engine, app.state, args, tasks)
        # vLLM's error handler tells its own uvicorn server to exit when the engine is dead. Here the server
        # is Serve's, which learns the same from check_health.
        app.state.server = SimpleNamespace(should_exit=False)
        return ReplicaIdMiddleware(app, replica_id)

    async def check_health(self) -> None:
        """Raises once the engine is dead, upon which Serve replaces the replica."""
        if self._engine is not None:
            await self._engine.check_health()

    async def stop(self) -> None:
        await self._running.aclose()


def command_line(settings: AppSettings) -> list[str]:
    """The options of `vllm serve` that `settings` amount to. True: the bare option; lists: repeated values."""
    options: dict[str, Any] = {
        "model": settings.model,
        "served_model_name": settings.name,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enable_prefix_caching": True,
        "enable_prompt_tokens_details": True,
        "middleware": f"{FirstTokenMiddleware.__module__}.{FirstTokenMiddleware.__qualname__}",
        **({"otlp_traces_endpoint": settings.otlp_traces_endpoint} if settings.otlp_traces_endpoint else {}),
        **settings.engine_args,
    }
    words: list[str] = []
    for name, value in options.items():
        words.append(f"--{'' if value is not False else 'no-'}{name.replace('_', '-')}")
        if not isinstance(value, bool):
            words += map(str, value if isinstance(value, list) else [value])
    return words
