"""The Ray Serve application: a fleet of replicas of one model.

    serve run serve_app.app:build engine=vllm model=meta-llama/Llama-3.1-8B-Instruct num_replicas=4

or `import_path: serve_app.app:build` with `args:` in a Serve config file (several applications with names and
route prefixes of their own run side by side), or `serve.run(build(AppSettings(...)))`. The cluster must have
been started with direct ingress on, see `direct_ingress.environment` and `cluster.py`.
"""

# Serve reads the builder's annotation to know what to validate, so annotations aren't postponed here.
from ray import serve
from ray.serve import Application
from starlette.types import ASGIApp

from serve_app import direct_ingress
from serve_app.engine.core import EngineSettings
from serve_app.engine.http import build_app
from serve_app.engine.timing import Timing
from serve_app.engine.tracing import TracingMiddleware, provider
from serve_app.settings import AppSettings

DEPLOYMENT = "Engine"

# Serve runs user code in a thread of its own so that blocking code can't starve its control loop. The simulated
# engine never blocks, and without the hop a request costs 1.0 ms of CPU rather than 1.4.
_SIMULATED_ENV = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
# Spans of both engines; vLLM would speak gRPC otherwise, which no other part of the stack does to a collector.
_TRACING_ENV = {"OTEL_SERVICE_NAME": "engine", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}


class SimulatedReplica:
    def __init__(self, settings: AppSettings) -> None:
        self._otlp_traces_endpoint = settings.otlp_traces_endpoint
        self._settings = EngineSettings(
            model=settings.name,
            kv_cache_tokens=settings.kv_cache_tokens,
            stream_interval_tokens=settings.stream_interval_tokens,
            timing=Timing().scaled(settings.time_scale),
        )

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        replica_id = direct_ingress.replica_id()
        app = build_app(self._settings, replica_id)
        if self._otlp_traces_endpoint is None:
            return app
        return TracingMiddleware(app, provider(self._otlp_traces_endpoint, replica_id))


class VllmReplica:
    def __init__(self, settings: AppSettings) -> None:
        # vLLM isn't installed where only simulated replicas run.
        from serve_app.vllm_engine import VllmServer  # noqa: PLC0415

        self._server = VllmServer(settings)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        return await self._server.start(direct_ingress.replica_id())

    async def check_health(self) -> None:
        await self._server.check_health()

    async def __del__(self) -> None:  # Serve awaits it when a replica has drained
        await self._server.stop()


def build(settings: AppSettings) -> Application:
    """The application builder that Serve calls; it validates the builder's arguments into `settings`."""
    replica, env = (SimulatedReplica, _SIMULATED_ENV) if settings.engine == "sim" else (VllmReplica, {})
    deployment = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=settings.num_replicas,
        max_ongoing_requests=settings.max_ongoing_requests,
        max_queued_requests=settings.max_queued_requests,
        health_check_period_s=settings.health_check_period_s,
        graceful_shutdown_timeout_s=settings.graceful_shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,  # how often a draining replica looks whether it is idle
        ray_actor_options={
            "num_cpus": settings.num_cpus,
            "num_gpus": settings.gpus_per_replica,
            "runtime_env": {"env_vars": env | _TRACING_ENV | settings.env},
        },
    )(serve.ingress()(replica))
    return deployment.bind(settings)
