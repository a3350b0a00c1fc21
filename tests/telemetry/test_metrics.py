"""The metrics of a router whose decisions are really made, and of the real process."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from demo.ports import free_port
from demo.wait import wait_until
from extproc.core.replica import EngineLoad, Replica
from extproc.core.request import Request
from extproc.core.router import PolicyName, Router, RouterSettings
from extproc.eds import EndpointDiscovery
from extproc.membership import Membership, MembershipSettings
from extproc.metrics import MAX_REPLICA_SERIES, RouterMetrics
from extproc.picker import EndpointPicker, Pick, ResponseStart
from extproc.services import EXTERNAL_PROCESSOR
from tests.component.serving import Serving
from tests.support.metrics import figure
from tests.support.page import get

PAGE = Path(__file__).parent.parent.parent / "docs" / "telemetry.md"
ROW = re.compile(r"^\| `(extproc_\w+)(?:\{([\w, ]+)\})?` \| (counter|gauge|histogram) \| .+ \|$", re.M)
GET = Request("GET", "/v1/models", {})


async def nobody() -> None:
    pass


def documented() -> dict[tuple[str, str], set[str]]:
    """(name, kind) -> labels, by the page; the next test holds it to what is really there."""
    return {
        (n, kind): set(filter(None, labels.split(", "))) for n, labels, kind in ROW.findall(PAGE.read_text("utf-8"))
    }


@dataclass
class Watched:
    """A picker and its metrics; its clock stands still unless the test moves it."""

    settings: RouterSettings = field(default_factory=RouterSettings)
    now_s: float = 100.0

    def __post_init__(self) -> None:
        self.router = Router(self.settings)
        endpoints = EndpointDiscovery()
        membership = Membership(MembershipSettings(), self.router, endpoints, nobody)
        self.metrics = RouterMetrics(self.router, membership, endpoints, None, {"fault": 0})
        self.picker = EndpointPicker(self.router, observer=self.metrics, clock=lambda: self.now_s)

    def fleet(self, size: int, **settings: bool) -> None:
        replicas = [Replica(f"replica-{number}", f"10.0.0.1:{8000 + number}", **settings) for number in range(size)]
        self.router.set_members(replicas, self.now_s)

    def pick(self, request: Request = GET) -> Pick:
        return self.picker.pick(request, None)

    def figure(self, name: str, **labels: str) -> float:
        return figure(self.metrics.text().decode(), name, **labels)


def chat(text: str) -> Request:
    body = f'{{"messages": [{{"role": "user", "content": "{text}"}}]}}'
    return Request("POST", "/v1/chat/completions", {"x-session-id": "mine"}, body.encode())


def test_decisions_by_policy_and_reason() -> None:
    watched = Watched()
    watched.pick()
    watched.fleet(2)
    watched.pick()
    watched.router.replace_settings(RouterSettings(policy=PolicyName.BOUNDED_LOAD), watched.now_s)
    watched.pick(chat("hello"))
    counts = {
        tuple(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(watched.metrics.text().decode())
        for sample in family.samples
        if sample.name == "extproc_decisions_total" and sample.value
    }
    assert counts == {
        ("expected_work", "no_replica"): 1,
        ("expected_work", "no_affinity"): 1,
        ("bounded_load", "session"): 1,
    }
    assert watched.figure("extproc_decisions_total", policy="bounded_load", reason="shed") == 0
    assert watched.figure("extproc_decision_seconds_count") == 3


def test_tokens_expected_and_found() -> None:
    watched = Watched()
    watched.fleet(1)
    long = chat("word " * 2000)  # 10,000 bytes at 4 bytes a token
    watched.pick(long).response_started(ResponseStart(200, True, 2500, 0, 0, None))
    assert watched.figure("extproc_cached_tokens_expected_total") == 0
    watched.pick(long).response_started(ResponseStart(200, True, 2500, 2000, 0, None))
    watched.pick(long).response_started(ResponseStart(200, True, None, None, None, None))
    assert watched.figure("extproc_cached_tokens_expected_total") == pytest.approx(2500, rel=0.02)
    assert watched.figure("extproc_cached_tokens_total") == 2000
    assert watched.figure("extproc_prompt_tokens_total") == 5000
    assert watched.figure("extproc_prediction_error_tokens_total") == pytest.approx(500, rel=0.1)


def test_the_first_token() -> None:
    watched = Watched()
    watched.fleet(1)
    for first_token in (True, False):
        pick = watched.pick()
        watched.now_s += 0.3
        pick.response_started(ResponseStart(200, first_token, None, None, None, None))
    assert watched.figure("extproc_first_token_seconds_count") == 1
    assert watched.figure("extproc_first_token_seconds_sum") == pytest.approx(0.3)
    assert watched.figure("extproc_first_token_seconds_bucket", le="0.2") == 0
    assert watched.figure("extproc_first_token_seconds_bucket", le="0.5") == 1


def test_members_by_state() -> None:
    watched = Watched(RouterSettings(saturation_in_flight=1))
    watched.fleet(3)
    picks = [watched.pick() for _ in range(4)]
    states = {state: watched.figure("extproc_replicas", state=state) for state in ("ready", "saturated", "draining")}
    assert states == {"ready": 2, "saturated": 1, "draining": 0}
    assert watched.figure("extproc_in_flight_max") == 2
    assert watched.figure("extproc_in_flight", router="this") == watched.figure("extproc_open_leases") == 4
    for pick in picks:
        pick.finish()
    watched.fleet(3, draining=True)
    assert watched.figure("extproc_replicas", state="draining") == watched.figure("extproc_replicas") == 3
    assert watched.figure("extproc_in_flight_max") == watched.figure("extproc_open_leases") == 0


def test_others_requests_and_the_age_of_what_engines_say() -> None:
    watched = Watched(now_s=time.monotonic())
    watched.fleet(2)
    with pytest.raises(KeyError):
        watched.figure("extproc_load_age_seconds")
    watched.router.set_load("replica-0", EngineLoad(running=7, waiting=0), watched.now_s - 100)
    watched.router.set_load("replica-1", EngineLoad(running=0, waiting=0), watched.now_s)
    assert watched.figure("extproc_in_flight", replica="replica-0", router="others") == 7
    assert 100 <= watched.figure("extproc_load_age_seconds") < 150


@pytest.mark.parametrize(("size", "shown"), [(MAX_REPLICA_SERIES, MAX_REPLICA_SERIES), (1000, 0)])
def test_a_large_fleet_is_shown_as_a_whole(size: int, shown: int) -> None:
    watched = Watched()
    watched.fleet(size)
    for _ in range(5):
        watched.pick()
    text = watched.metrics.text().decode()
    assert text.count('replica="replica-') == 3 * shown
    assert figure(text, "extproc_replicas") == size
    assert figure(text, "extproc_in_flight_max") == 1
    assert len(text.splitlines()) < 200 + 3 * shown


def test_the_page_lists_all_metrics() -> None:
    watched = Watched(now_s=time.monotonic())
    watched.fleet(1)
    watched.router.set_load("replica-0", EngineLoad(running=0, waiting=0), watched.now_s)
    families = {
        (family.name + "_total" * (family.type == "counter"), family.type): {
            label for sample in family.samples for label in sample.labels if label != "le"
        }
        for family in text_string_to_metric_families(watched.metrics.text().decode())
        if not family.name.endswith("_created")
    }
    # Of a feed that has been read, and of engines that are polled: seen in the process below.
    families |= {("extproc_membership_age_seconds", "gauge"): set(), ("extproc_load_failures_total", "counter"): set()}
    assert documented() == families


def test_failures_are_counted(tmp_path: Path) -> None:
    admin, nobody_there = free_port(), free_port()
    load = {"enabled": True, "poll_s": 0.05, "timeout_s": 1.0}
    with Serving(tmp_path, {"admin": {"listen": f"127.0.0.1:{admin}"}, "load": load}) as serving:
        serving.fleet(f"127.0.0.1:{nobody_there}")
        serving.wait_for("ready")

        def now(name: str, **labels: str) -> float:
            return figure(get(f"http://127.0.0.1:{admin}/metrics"), name, **labels)

        wait_until(lambda: now("extproc_load_failures_total") > 0, "a failed poll")
        assert now("extproc_membership_age_seconds") < 10
        assert now("extproc_stream_errors_total") == 0
        with grpc.insecure_channel(f"127.0.0.1:{serving.port}") as channel:
            call = channel.stream_stream(f"/{EXTERNAL_PROCESSOR}/Process")
            with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
                list(call(iter([b"\xff\xff nonsense"]), timeout=10))
        assert now("extproc_stream_errors_total", kind="unknown_message") == 1
        assert now("extproc_stream_errors_total", kind="fault") == 0
