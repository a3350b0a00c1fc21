"""Network addresses as they are written: "host:port", an IPv6 host in brackets."""

from __future__ import annotations


def split_address(address: str) -> tuple[str, int]:
    """(host without brackets, port). Raises ValueError on anything else."""
    host, _, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or (":" in bare and bare == host) or not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError(f'expected "host:port", got {address!r}')
    return bare, int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
