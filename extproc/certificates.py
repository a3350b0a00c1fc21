"""TLS of the gRPC port: certificate files that may be replaced under way."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files. client_ca: signs the certificates of those who may call; empty: whoever reaches the port may."""

    certificate: str
    key: str
    client_ca: str = ""

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials that look at the files again for each new connection: one that is open keeps its own, and
        Envoy opens few. What does not fit together is logged, and the certificate before it stays.

        Raises ValueError that names the key and the file where they do not hold now.
        """
        import grpc  # noqa: PLC0415  # its core is many megabytes, and the other transport needs none of it

        return grpc.dynamic_ssl_server_credentials(
            self._read(),
            self._read_again,  # type: ignore[arg-type]  # its stubs forget None, "as before"
            require_client_authentication=bool(self.client_ca),
        )

    def contexts(self) -> Callable[[], ssl.SSLContext]:
        """The same for OpenSSL: a context for each new connection. Raises ValueError as above."""
        good = self._context()

        def newest() -> ssl.SSLContext:
            nonlocal good
            try:
                good = self._context()
            except ValueError as error:
                log.error("new certificate refused, the old one stays: %s", error)
            return good

        return newest

    def _read_again(self) -> grpc.ServerCertificateConfiguration | None:
        try:
            return self._read()
        except ValueError as error:
            log.error("new certificate refused, the old one stays: %s", error)
            return None

    def _read(self) -> grpc.ServerCertificateConfiguration:
        certificate = _pem("tls_certificate", self.certificate)
        key = _pem("tls_key", self.key)
        client_ca = _pem("tls_client_ca", self.client_ca) if self.client_ca else None
        self._context()  # gRPC would say no more than "failed to bind", and only where it is told so at the start
        import grpc  # noqa: PLC0415  # as above

        return grpc.ssl_server_certificate_configuration([(key, certificate)], client_ca)

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2"])
        try:
            # The password keeps OpenSSL from asking a terminal for one.
            context.load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ValueError) as error:
            raise ValueError(f"tls_certificate {self.certificate} with tls_key {self.key}: {error}") from error
        if self.client_ca:
            try:
                context.load_verify_locations(self.client_ca)
            except OSError as error:
                raise ValueError(f"tls_client_ca {self.client_ca}: {error}") from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _pem(setting: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{setting} {path}: {error.strerror}") from error
