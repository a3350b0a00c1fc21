"""Settings of the admin port."""

from __future__ import annotations

from dataclasses import dataclass

from extproc.address import split_address


@dataclass(frozen=True, slots=True)
class AdminSettings:
    """The admin port.

    listen: "host:port"; "": none. It shows replicas and load to whoever can reach it, so keep it on loopback or within
        the cluster. The default is the port after that of Envoy's own admin in `extproc envoy-config`.
    recent_decisions: how many are kept to be shown, at about 0.5 KB each.
    """

    listen: str = "127.0.0.1:9902"
    recent_decisions: int = 1000

    def __post_init__(self) -> None:
        if self.listen:
            split_address(self.listen)
        if self.recent_decisions < 1:
            raise ValueError("recent_decisions must be above 0")
