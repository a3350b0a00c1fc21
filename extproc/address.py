"""Addresses as they are written: "host:port", an IPv6 host in brackets; "unix:/path" where a socket may stand."""

from __future__ import annotations

from typing import Final

UNIX: Final = "unix:"
LONGEST_SOCKET_PATH_BYTES: Final = 107
"""Of Linux's sockaddr_un, less the final NUL."""


def split_address(address: str) -> tuple[str, int]:
    """(host without brackets, port). Raises ValueError on anything else."""
    host, _, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or (":" in bare and bare == host) or not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError(f'expected "host:port", got {address!r}')
    return bare, int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def socket_path(address: str) -> str:
    """The path of "unix:/path"; empty for any other address. Raises ValueError on a path that none can listen on."""
    if not address.startswith(UNIX):
        return ""
    path = address.removeprefix(UNIX)
    if not path.startswith("/") or not 1 < len(path.encode()) <= LONGEST_SOCKET_PATH_BYTES:
        raise ValueError(f'expected "unix:/path", absolute and {LONGEST_SOCKET_PATH_BYTES} bytes at most: {address!r}')
    return path


def check_address(address: str) -> None:
    """Raises ValueError on what is neither "host:port" nor "unix:/path"."""
    if not socket_path(address):
        split_address(address)
