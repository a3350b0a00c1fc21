"""The order in which router and Envoys learn of a fleet, and what becomes of it when its feed fails.

A watched file is the feed; endpoint discovery and router are the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from demo.wait import until
from extproc.core.features import FeatureSettings, extract
from extproc.core.request import Request
from extproc.core.router import Router
from extproc.eds import EndpointDiscovery
from extproc.feeds.static import StaticReplica
from extproc.membership import Membership, MembershipSettings, Source
from tests.membership.envoy import Envoy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from extproc.core.decision import Decision

A, B, C = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"
LONG_S = 60.0
"""Longer than any test waits: what depends on it does not happen by itself."""


class Fleet:
    """A membership that runs, its feed's file and its router."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.settings = MembershipSettings(Source.FILE, file=str(file), poll_s=0.02, ask_models=False, confirm_s=LONG_S)
        self.router = Router()
        self.discovery = EndpointDiscovery()
        self.known_times = 0
        self.membership = Membership(self.settings, self.router, self.discovery, self._known)

    async def _known(self) -> None:
        self.known_times += 1

    def list(self, *entries: str | dict[str, Any]) -> None:
        """Write the file: endpoints, or whole entries."""
        replicas = [{"endpoint": entry} if isinstance(entry, str) else entry for entry in entries]
        self.write(json.dumps({"replicas": replicas}))

    def write(self, text: str) -> None:
        half = self._file.with_suffix(".new")
        half.write_text(text)
        half.replace(self._file)

    def confirm_within(self, confirm_s: float) -> None:
        self.membership.settings = replace(self.settings, confirm_s=confirm_s)

    @property
    def routed(self) -> set[str]:
        """The endpoints that the router may name."""
        return {load.replica.endpoint for load in self.router.loads.values()}

    async def routes(self, *endpoints: str) -> None:
        await so(lambda: self.routed == set(endpoints), f"the router knows exactly {endpoints}")

    async def looks(self, times: int = 3) -> None:
        """Wait for so many more failed looks."""
        before = self.membership.failures
        await so(lambda: self.membership.failures >= before + times, f"{times} failed looks")

    def decide(self) -> Decision:
        now_s = monotonic()
        decision = self.router.decide(extract(Request("GET", "/v1/models", {}), FeatureSettings()), now_s)
        if decision.lease is not None:
            self.router.finish(decision.lease, now_s)
        return decision


async def so(condition: Callable[[], bool], what: str) -> None:
    async def asked() -> bool:
        return condition()

    await until(asked, what)


async def a_while() -> None:
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest_asyncio.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path / "fleet.json")
    running = asyncio.create_task(fleet.membership.run())
    yield fleet
    assert not running.done()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


# --- the order ---


async def test_without_an_envoy_nothing_is_waited_for(fleet: Fleet) -> None:
    fleet.list(A, B)
    await fleet.routes(A, B)
    fleet.list(B, C)
    await fleet.routes(B, C)


async def test_a_replica_that_comes_is_named_once_envoy_knows_it(fleet: Fleet) -> None:
    async with Envoy(fleet.discovery) as envoy:
        fleet.list(A)
        assert await envoy.told() == {A}
        await a_while()
        assert fleet.routed == set()
        assert fleet.known_times == 0
        envoy.accept()
        await fleet.routes(A)

        fleet.list(A, B)
        assert await envoy.told() == {A, B}
        await a_while()
        assert fleet.routed == {A}
        envoy.accept()
        await fleet.routes(A, B)


async def test_every_envoy_must_know_it(fleet: Fleet) -> None:
    async with Envoy(fleet.discovery) as one, Envoy(fleet.discovery) as other:
        fleet.list(A)
        for envoy in (one, other):
            assert await envoy.told() == {A}
        one.accept()
        await a_while()
        assert fleet.routed == set()
        other.accept()
        await fleet.routes(A)


async def test_a_replica_that_goes_is_not_named_any_more_when_envoy_forgets_it(fleet: Fleet) -> None:
    fleet.list(A, B)
    await fleet.routes(A, B)
    async with Envoy(fleet.discovery) as envoy:
        assert await envoy.told() == {A, B}
        envoy.accept()
        fleet.list(A)
        assert await envoy.told() == {A}
        assert fleet.routed == {A}


async def test_one_that_comes_does_not_hold_up_one_that_goes(fleet: Fleet) -> None:
    fleet.list(A, B)
    await fleet.routes(A, B)
    async with Envoy(fleet.discovery) as envoy:
        assert await envoy.told() == {A, B}
        fleet.list(A, C)
        assert await envoy.told() == {A, C}
        await a_while()
        assert fleet.routed == {A}
        envoy.accept()
        await fleet.routes(A, C)


async def test_where_all_go_at_once_they_go_when_the_new_ones_are_in_force(fleet: Fleet) -> None:
    fleet.list(A)
    await fleet.routes(A)
    async with Envoy(fleet.discovery) as envoy:
        assert await envoy.told() == {A}
        fleet.list(B, C)
        assert await envoy.told() == {A, B, C}
        await a_while()
        assert fleet.routed == {A}
        envoy.accept()
        await fleet.routes(B, C)
        assert await envoy.told() == {B, C}


async def test_a_replica_that_moves_is_named_once_envoy_knows_its_new_address(fleet: Fleet) -> None:
    fleet.list({"id": "a", "endpoint": A}, {"id": "b", "endpoint": B})
    await fleet.routes(A, B)
    async with Envoy(fleet.discovery) as envoy:
        assert await envoy.told() == {A, B}
        fleet.list({"id": "a", "endpoint": A}, {"id": "b", "endpoint": C})
        assert await envoy.told() == {A, C}
        await a_while()
        assert fleet.routed == {A}
        envoy.accept()
        await fleet.routes(A, C)


async def test_an_address_that_is_used_again_belongs_to_the_new_replica_alone(fleet: Fleet) -> None:
    fleet.list({"id": "a", "endpoint": A})
    await fleet.routes(A)
    old = fleet.router.loads["a"]
    fleet.list({"id": "new", "endpoint": A})
    await so(lambda: set(fleet.router.loads) == {"new"}, "the new replica is in force")
    assert fleet.router.loads["new"].serial != old.serial


async def test_what_stays_keeps_its_requests(fleet: Fleet) -> None:
    fleet.list(A)
    await fleet.routes(A)
    fleet.router.decide(extract(Request("GET", "/v1/models", {}), FeatureSettings()), monotonic())
    fleet.list({"endpoint": A, "weight": 2.0}, B)
    await fleet.routes(A, B)
    assert fleet.router.in_flight(A) == 1
    assert fleet.router.loads[A].replica.weight == 2.0


@pytest.mark.parametrize("how", ["silent", "refuses", "leaves"])
async def test_an_envoy_that_does_not_confirm_holds_nobody_up_for_long(fleet: Fleet, how: str) -> None:
    if how == "silent":
        fleet.confirm_within(0.2)
    async with contextlib.AsyncExitStack() as stack:
        envoy = await stack.enter_async_context(Envoy(fleet.discovery))
        fleet.list(A)
        assert await envoy.told() == {A}
        if how == "refuses":
            envoy.refuse()
        if how == "leaves":
            await stack.aclose()
        await fleet.routes(A)


async def test_the_same_list_is_no_news(fleet: Fleet) -> None:
    async with Envoy(fleet.discovery) as envoy:
        fleet.list(A, B)
        await envoy.told()
        envoy.accept()
        await fleet.routes(A, B)
        version = fleet.router.membership_version
        fleet.list(B, A)
        read_s = fleet.membership.last_read_s
        assert read_s is not None
        await so(lambda: (fleet.membership.last_read_s or 0.0) > read_s + 0.1, "it was read again")
        assert envoy.is_told_nothing_new
        assert fleet.router.membership_version == version
        assert fleet.known_times == 1


# --- a feed that fails ---


async def test_a_feed_that_fails_keeps_the_last_known_and_says_so(fleet: Fleet) -> None:
    fleet.list(A, B)
    await fleet.routes(A, B)
    assert not fleet.decide().stale
    async with Envoy(fleet.discovery) as envoy:
        await envoy.told()
        fleet.write('{"replicas": [')
        await fleet.looks()
        assert fleet.routed == {A, B}
        assert fleet.decide().stale
        assert envoy.is_told_nothing_new
        fleet.list(A, B)
        await so(lambda: not fleet.decide().stale, "the feed is found again")
        assert envoy.is_told_nothing_new
    assert fleet.known_times == 1


async def test_a_feed_that_names_nobody_is_not_believed(fleet: Fleet) -> None:
    fleet.list(A)
    await fleet.routes(A)
    fleet.list()
    await fleet.looks()
    assert fleet.routed == {A}
    assert fleet.decide().stale
    fleet.list(B)
    await fleet.routes(B)
    assert not fleet.decide().stale


@pytest.mark.parametrize("content", [None, "", '{"replicas": []}'])
async def test_envoy_is_told_nothing_before_a_first_replica_is_known(fleet: Fleet, content: str | None) -> None:
    """One that outlived an earlier router keeps what that one told it."""
    async with Envoy(fleet.discovery) as envoy:
        if content is not None:
            fleet.write(content)
        await fleet.looks()
        assert envoy.is_told_nothing_new
        assert fleet.known_times == 0
        fleet.list(A)
        assert await envoy.told() == {A}
        envoy.accept()
        await so(lambda: fleet.known_times == 1, "the fleet is known")
    assert not fleet.decide().stale


async def test_other_settings_are_followed(fleet: Fleet) -> None:
    fleet.list(A)
    await fleet.routes(A)
    fleet.membership.settings = MembershipSettings(
        Source.STATIC, replicas=(StaticReplica(B),), poll_s=0.02, ask_models=False
    )
    await fleet.routes(B)
    fleet.membership.settings = fleet.settings
    await fleet.routes(A)


# --- replicas that are unwell ---


async def test_an_unwell_replica_drains_and_comes_back(fleet: Fleet) -> None:
    fleet.list(A, B)
    await fleet.routes(A, B)
    async with Envoy(fleet.discovery) as envoy:
        await envoy.told()
        assert envoy.endpoints == {A: False, B: False}
        envoy.accept()
        sick = asyncio.create_task(fleet.membership.set_unwell(frozenset({A})))
        await envoy.told()
        assert envoy.endpoints == {A: True, B: False}
        assert {fleet.decide().endpoint for _ in range(10)} == {B}  # at once, whether it has confirmed or not
        envoy.accept()
        await sick
        well = asyncio.create_task(fleet.membership.set_unwell(frozenset()))
        await envoy.told()
        assert envoy.endpoints == {A: False, B: False}
        envoy.accept()
        await well
        await so(lambda: fleet.decide().endpoint == A, "it is chosen again")


async def test_where_all_are_unwell_they_are_still_chosen(fleet: Fleet) -> None:
    fleet.list(A, B)
    await fleet.routes(A, B)
    await fleet.membership.set_unwell(frozenset({A, B}))
    assert fleet.decide().endpoint in {A, B}


async def test_one_that_was_unwell_before_the_fleet_is_known(fleet: Fleet) -> None:
    await fleet.membership.set_unwell(frozenset({A}))
    fleet.list(A, B)
    await fleet.routes(A, B)
    assert {fleet.decide().endpoint for _ in range(10)} == {B}
