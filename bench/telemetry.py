"""What a decision's span costs: `python -m bench.telemetry`.

Three observers' calls per request, as the picker makes them: with a client whose trace nobody keeps, with requests
of which none is sampled, and with all of them recorded and exported to nowhere. The best of several rounds.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import Final

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased

from bench.core import Cost, best_round, chat
from extproc.core.features import FeatureSettings, extract
from extproc.core.replica import Replica
from extproc.core.request import Request
from extproc.core.router import Router
from extproc.picker import ResponseStart
from extproc.telemetry import DecisionSpans

TRACE: Final = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"
ROUNDS: Final = 5
REQUESTS: Final = 1000
CASES: Final = (
    ("the client's trace is not sampled", "00", 1.0),
    ("no trace, and not sampled", None, 0.0),
    ("sampled", "01", 1.0),
)


class Nowhere(SpanExporter):
    """Takes everything at once."""

    def export(self, spans: object) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def cost_of_spans(flag: str | None, sample_ratio: float) -> Cost:
    """Of one request, in microseconds. flag: of the trace that it comes with, None: it comes with none."""
    provider = TracerProvider(ParentBased(ALWAYS_ON))
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    spans = DecisionSpans(provider, "expected_work", sample_ratio)
    sent = chat(1, 4096)
    headers = sent.headers if flag is None else {**sent.headers, "traceparent": TRACE + flag}
    request = Request(sent.method, sent.path, headers, sent.body)
    router = Router()
    router.set_members([Replica(f"replica-{each}", f"10.0.0.{each}:8000") for each in range(16)], 0.0)
    features = extract(request, FeatureSettings())
    decision = router.decide(features, 0.0)
    start = ResponseStart(200, True, 1000, 900, 0, decision.endpoint)

    def play() -> list[int]:
        durations_ns = []
        for _ in range(REQUESTS):
            began_ns = perf_counter_ns()
            spans.decided(request, features, decision, 0.0001)
            spans.response_started(decision, start, 0.1)
            spans.finished(decision, 0.2)
            durations_ns.append(perf_counter_ns() - began_ns)
        return durations_ns

    cost = best_round(play() for _ in range(ROUNDS))
    provider.shutdown()
    return cost


def main() -> None:
    for name, flag, sample_ratio in CASES:
        cost = cost_of_spans(flag, sample_ratio)
        print(f"{name:36}{cost.p50_us:8.1f} us  (p99 {cost.p99_us:.1f})")


if __name__ == "__main__":
    main()
