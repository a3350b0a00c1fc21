"""A real Ray cluster with two replicas of the simulated engine."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
import pytest

from demo.wait import wait_until
from serve_app.cluster import ClusterError, RayCluster
from serve_app.settings import AppSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster.start(min_draining_s=1.0) as cluster:
        cluster.deploy(AppSettings(num_replicas=2, time_scale=0.1))
        yield cluster


def call(endpoint: str, path: str, body: Any = None) -> tuple[int, str | None, bytes]:
    """Status, x-replica-id and body."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(f"http://{endpoint}{path}", data), timeout=20) as answer:
            return answer.status, answer.headers["x-replica-id"], answer.read()
    except HTTPError as error:
        return error.code, error.headers["x-replica-id"], error.read()


def test_each_replica_answers_on_its_own_port_by_its_own_name(cluster: RayCluster) -> None:
    replicas = cluster.replicas()
    assert len({replica.endpoint for replica in replicas}) == len({replica.id for replica in replicas}) == 2
    question = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    for replica in replicas:
        for path, body, status in [
            ("/v1/chat/completions", question, 200),
            ("/v1/chat/completions", {**question, "stream": True}, 200),
            ("/v1/chat/completions", {}, 400),
            ("/v1/models", None, 200),
            ("/health", None, 200),
            ("/metrics", None, 200),
            ("/nothing", None, 404),
            ("/-/healthz", None, 200),  # answered by Serve itself
        ]:
            assert call(replica.endpoint, path, body)[:2] == (status, replica.id), path


def test_caches_are_not_shared(cluster: RayCluster) -> None:
    first, second = (replica.endpoint for replica in cluster.replicas())
    question = {"messages": [{"role": "user", "content": "x" * 1024}], "max_tokens": 1}

    def cached_tokens(endpoint: str) -> int:
        usage = json.loads(call(endpoint, "/v1/chat/completions", question)[2])["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    # marker 2 + text 256 + end 1 + marker 3 = 262 tokens: 16 whole blocks
    assert [cached_tokens(endpoint) for endpoint in (first, first, second)] == [0, 256, 0]


def test_scaling_keeps_the_replicas_that_stay(cluster: RayCluster) -> None:
    before = {replica.id for replica in cluster.replicas()}
    cluster.scale(3)
    assert before < {replica.id for replica in cluster.replicas()}
    cluster.scale(2)
    assert len(cluster.replicas()) == 2


def test_a_killed_replica_is_replaced_by_another_id(cluster: RayCluster) -> None:
    victim, survivor = cluster.replicas()
    os.kill(victim.pid, signal.SIGKILL)

    def replaced() -> bool:
        ids = {replica.id for replica in cluster.replicas()}
        return len(ids) == 2 and survivor.id in ids and victim.id not in ids

    wait_until(replaced, "another replica has taken the victim's place", 60)


def test_another_revision_rolls_all_replicas(cluster: RayCluster) -> None:
    before = {replica.id for replica in cluster.replicas()}
    cluster.deploy(AppSettings(num_replicas=2, time_scale=0.1, revision="2"))
    assert before.isdisjoint(replica.id for replica in cluster.replicas())


def test_applications_run_side_by_side(cluster: RayCluster) -> None:
    cluster.deploy(AppSettings(model="other"), name="other", route_prefix="/other")
    [other] = cluster.replicas("other")
    assert other.id not in {replica.id for replica in cluster.replicas()}
    assert b'"other"' in call(other.endpoint, "/other/v1/models")[2]
    cluster.delete("other")
    assert cluster.replicas("other") == []
    assert len(cluster.replicas()) == 2


def test_a_full_replica_refuses_at_once_and_says_who(cluster: RayCluster) -> None:
    cluster.deploy(AppSettings(max_ongoing_requests=1, max_queued_requests=1), name="full", route_prefix="/full")
    [replica] = cluster.replicas("full")
    question = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20}  # half a second
    with ThreadPoolExecutor(5) as clients:
        futures = [clients.submit(call, replica.endpoint, "/full/v1/chat/completions", question) for _ in range(5)]
        answers = [future.result() for future in futures]
    # One runs, one waits; whether a third may wait too depends on who reads the counts first.
    statuses = sorted(status for status, _, _ in answers)
    assert statuses[:2] == [200, 200]
    assert statuses[-2:] == [503, 503]
    assert {replica_id for _, replica_id, _ in answers} == {replica.id}
    cluster.delete("full")


def test_a_failed_deployment_says_why(cluster: RayCluster) -> None:
    with pytest.raises(ClusterError, match="engine_args"):
        cluster.deploy(AppSettings.model_construct(engine_args="not an object"), name="broken", route_prefix="/broken")
    cluster.delete("broken")


def test_stop_leaves_nothing_behind() -> None:
    before = set(psutil.Process().children(recursive=True))
    cluster = RayCluster.start()
    cluster.deploy(AppSettings())
    started = set(psutil.Process().children(recursive=True)) - before
    assert len(started) > 5
    cluster.stop()
    assert [process for process in started if process.is_running()] == []
    cluster.stop()
