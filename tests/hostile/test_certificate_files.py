"""Certificate files and sockets that do not hold: what the service says of them."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import TYPE_CHECKING

import pytest

from extproc.address import split_address
from extproc.core.router import Router
from extproc.eds import EndpointDiscovery
from extproc.picker import EndpointPicker
from extproc.server import Server, ServerSettings
from tests.hostile.certificates import Certificates

if TYPE_CHECKING:
    from pathlib import Path


def server(settings: ServerSettings) -> Server:
    return Server(settings, EndpointPicker(Router()), EndpointDiscovery())


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "certificates")


def spoil(path: Path, content: bytes | None) -> None:
    """None: it is gone."""
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("setting", "file", "content"),
    [
        ("tls_certificate", "router", None),
        ("tls_key", "router_key", None),
        ("tls_client_ca", "ca", None),
        ("tls_certificate", "router", b""),
        ("tls_key", "router_key", b"no key"),
        ("tls_client_ca", "ca", b"no certificate"),
    ],
)
async def test_a_file_that_does_not_hold_is_named_with_its_key(
    certificates: Certificates, setting: str, file: str, content: bytes | None
) -> None:
    path: Path = getattr(certificates, file)
    spoil(path, content)
    with pytest.raises(RuntimeError, match=rf"server\..*{setting} {path}"):
        await server(certificates.server_settings(mutual=True)).start()


async def test_the_key_of_another_certificate_is_an_error(certificates: Certificates) -> None:
    certificates.router_key.write_bytes(certificates.client_key.read_bytes())
    with pytest.raises(RuntimeError, match=r"tls_key .*MISMATCH"):
        await server(certificates.server_settings(mutual=False)).start()


async def test_a_renewal_that_does_not_hold_leaves_the_old_certificate(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    running = server(certificates.server_settings(mutual=False))
    address = split_address(await running.start())
    try:
        before = await asyncio.to_thread(ssl.get_server_certificate, address, timeout=10)
        key = certificates.router_key.read_bytes()
        certificates.router_key.write_bytes(b"half a k")
        assert await asyncio.to_thread(ssl.get_server_certificate, address, timeout=10) == before
        assert str(certificates.router_key) in caplog.text
        assert "half a k" not in caplog.text
        certificates.router_key.write_bytes(key)
        certificates.renew()
        assert await asyncio.to_thread(ssl.get_server_certificate, address, timeout=10) != before
    finally:
        await running.stop()


async def test_a_socket_left_by_a_crash_is_replaced_and_one_in_use_is_not(tmp_path: Path) -> None:
    path = tmp_path / "router.sock"
    with socket.socket(socket.AF_UNIX) as crashed:
        crashed.bind(str(path))
    assert path.exists()
    settings = ServerSettings(listen=f"unix:{path}", notice_s=0.0)
    running = server(settings)
    assert await running.start() == settings.listen
    try:
        with pytest.raises(RuntimeError, match="another process listens there"):
            await server(settings).start()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    finally:
        await running.stop()


async def test_a_file_that_is_no_socket_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("keep me")
    with pytest.raises(RuntimeError, match="cannot listen"):
        await server(ServerSettings(listen=f"unix:{path}", notice_s=0.0)).start()
    assert path.read_text() == "keep me"


async def test_a_socket_file_that_somebody_removed_does_not_keep_it_from_leaving(tmp_path: Path) -> None:
    path = tmp_path / "router.sock"
    running = server(ServerSettings(listen=f"unix:{path}", notice_s=0.0))
    await running.start()
    path.unlink()
    await running.stop()
