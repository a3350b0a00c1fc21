"""TLS, mutual TLS and a Unix socket between a real Envoy and the router."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from typing import TYPE_CHECKING

import pytest

from demo.wait import until
from extproc.address import split_address
from extproc.core.router import Router
from extproc.eds import EndpointDiscovery
from extproc.envoy_config import EnvoySettings
from extproc.picker import EndpointPicker
from extproc.server import Server, ServerSettings
from tests.hostile.certificates import Certificates
from tests.support.envoy import Envoy
from tests.support.proxied_fleet import ProxiedFleet, proxied_fleet

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.e2e

TRANSPORTS = ["tls", "mutual tls", "socket", "mutual tls over a socket"]


def ends(transport: str, directory: Path) -> tuple[ServerSettings, EnvoySettings]:
    """What both ends are configured with."""
    listen = f"unix:{directory}/router.sock" if "socket" in transport else "127.0.0.1:0"
    if "tls" not in transport:
        return ServerSettings(listen=listen), EnvoySettings()
    certificates, mutual = Certificates(directory / "certificates"), "mutual" in transport
    return certificates.server_settings(mutual, listen), certificates.envoy_settings(mutual)


async def sticks(fleet: ProxiedFleet, session: str) -> bool:
    """Whether the router decided about each turn, and all went where it said."""
    before = len(fleet.watch.decisions)
    answers = [await fleet.ask(headers={"x-session-id": session}) for _ in range(3)]
    named = [decision.endpoint for decision in fleet.watch.decisions[before:]]
    return [answer.endpoint for answer in answers] == named and len(set(named)) == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_envoy_learns_the_fleet_and_routes_over(transport: str, tmp_path: Path) -> None:
    server, envoy = ends(transport, tmp_path)
    async with proxied_fleet(tmp_path, size=2, server=server, envoy=envoy) as fleet:
        assert await sticks(fleet, "a") and await sticks(fleet, "b")
        handshakes = await asyncio.to_thread(fleet.envoy.stat, "cluster.extproc.ssl.handshake")
        assert (handshakes > 0) == ("tls" in transport)


async def refused(envoy: Envoy, by: str) -> None:
    """Wait until Envoy has tried the router twice; then it must know nothing of the fleet.

    by: Envoy's counter of the attempts that failed for the right reason.
    """

    async def tried() -> bool:
        return await asyncio.to_thread(envoy.stat, by) >= 2

    await until(tried, f"two attempts counted by {by}", 20.0)
    assert not envoy.sees_router()
    assert envoy.endpoints() == set()


@pytest.mark.parametrize("shown", ["none", "another authority's"])
async def test_an_envoy_without_the_right_certificate_is_refused(shown: str, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certificates")
    stranger = Certificates(tmp_path / "stranger")
    shutil.copy(certificates.ca, stranger.ca)  # so that only what it shows is wrong
    server = certificates.server_settings(mutual=True)
    async with proxied_fleet(tmp_path, size=1, server=server, envoy=certificates.envoy_settings(mutual=True)) as fleet:
        directory = tmp_path / "refused"
        directory.mkdir()
        settings = stranger.envoy_settings(mutual=shown != "none")
        with await asyncio.to_thread(Envoy, directory, fleet.envoy.settings.router, settings) as envoy:
            await refused(envoy, "cluster.extproc.health_check.failure")
        assert await sticks(fleet, "a")


@pytest.mark.parametrize(("wrong", "counter"), [("authority", "fail_verify_error"), ("name", "fail_verify_san")])
async def test_a_router_that_cannot_prove_its_name_is_not_asked(wrong: str, counter: str, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certificates")
    other = Certificates(tmp_path / "other", *["other.test"] * (wrong == "name"))
    if wrong == "name":
        shutil.copy(other.ca, certificates.ca)
    server = Server(other.server_settings(mutual=False), EndpointPicker(Router()), EndpointDiscovery())
    address = await server.start()
    server.set_ready(True)
    try:
        with await asyncio.to_thread(Envoy, tmp_path, address, certificates.envoy_settings(mutual=False)) as envoy:
            await refused(envoy, f"cluster.extproc.ssl.{counter}")
    finally:
        await server.stop()


async def test_plain_text_is_refused_where_tls_is_spoken(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certificates")
    server = Server(certificates.server_settings(mutual=False), EndpointPicker(Router()), EndpointDiscovery())
    address = await server.start()
    try:
        with await asyncio.to_thread(Envoy, tmp_path, address) as envoy:
            await refused(envoy, "cluster.extproc.health_check.failure")
    finally:
        await server.stop()


async def shown_by(address: str) -> str:
    """The certificate that a new connection is shown, as PEM."""
    return await asyncio.to_thread(ssl.get_server_certificate, split_address(address), timeout=10)


def first_of(pem: str) -> str:
    return pem[: pem.index("-----END") + len("-----END CERTIFICATE-----")].strip()


async def test_renewed_certificates_hold_without_a_restart(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certificates")
    server, envoy = certificates.server_settings(mutual=True), certificates.envoy_settings(mutual=True)
    async with proxied_fleet(tmp_path, size=2, server=server, envoy=envoy) as fleet:
        address = fleet.envoy.settings.router
        for _ in range(2):
            assert (await shown_by(address)).strip() == first_of(certificates.router.read_text())
            assert await sticks(fleet, "a")
            certificates.renew()


async def test_a_new_authority_holds_without_a_restart_of_envoy(tmp_path: Path) -> None:
    """All certificates at once, the hardest renewal: the ends may differ for a moment, and no request may fail."""
    certificates = Certificates(tmp_path / "certificates")
    server, envoy = certificates.server_settings(mutual=True), certificates.envoy_settings(mutual=True)
    async with proxied_fleet(tmp_path, size=2, server=server, envoy=envoy) as fleet:
        certificates.change_authority()
        assert {(await fleet.ask(headers={"x-session-id": "a"})).status for _ in range(20)} == {200}
        # Both ends on new connections, with nothing left of the old authority.
        await fleet.server.stop()
        again = Server(
            certificates.server_settings(mutual=True, listen=fleet.envoy.settings.router),
            EndpointPicker(fleet.router, observer=fleet.watch),
            fleet.discovery,
        )
        await again.start()
        try:
            again.set_ready(True)
            await asyncio.to_thread(fleet.envoy.wait_for_router, fleet.endpoints)
            assert await sticks(fleet, "a")
        finally:
            await again.stop()
