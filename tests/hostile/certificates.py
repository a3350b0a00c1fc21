"""Certificates of a router and of its Envoys, made for the test and renewed under way."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import trustme

from extproc.envoy_config import EnvoySettings
from extproc.server import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ROUTER_NAME = "router.test"


class Certificates:
    """PEM files of one authority that signs both ends, laid out as an operator would."""

    def __init__(self, directory: Path, router_name: str = ROUTER_NAME) -> None:
        directory.mkdir()
        self.ca = directory / "ca.pem"
        self.router, self.router_key = directory / "router.pem", directory / "router-key.pem"
        self.client, self.client_key = directory / "client.pem", directory / "client-key.pem"
        self._router_name = router_name
        self.change_authority()

    def change_authority(self) -> None:
        """Everything anew, by a new authority that alone is trusted."""
        self._authority = trustme.CA()
        _put(self.ca, [self._authority.cert_pem])
        self.renew()

    def renew(self) -> None:
        """New certificates for both ends."""
        for name, certificate, key in (
            (self._router_name, self.router, self.router_key),
            ("envoy.test", self.client, self.client_key),
        ):
            issued = self._authority.issue_cert(name)
            _put(key, [issued.private_key_pem])
            _put(certificate, issued.cert_chain_pems)

    def server_settings(self, mutual: bool, listen: str = "127.0.0.1:0") -> ServerSettings:
        client_ca = str(self.ca) if mutual else ""
        return ServerSettings(
            listen=listen,
            tls_certificate=str(self.router),
            tls_key=str(self.router_key),
            tls_client_ca=client_ca,
        )

    def envoy_settings(self, mutual: bool) -> EnvoySettings:
        return EnvoySettings(
            router_tls_ca=str(self.ca),
            router_tls_name=ROUTER_NAME,
            router_tls_certificate=str(self.client) if mutual else "",
            router_tls_key=str(self.client_key) if mutual else "",
        )


def _put(path: Path, blobs: Sequence[trustme.Blob]) -> None:
    """Moved into its place, so that nobody reads half a file."""
    new = path.with_suffix(".new")
    new.write_bytes(b"".join(blob.bytes() for blob in blobs))
    os.replace(new, path)
