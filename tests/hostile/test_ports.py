"""Where the router can be reached."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import pytest

from demo.ports import free_port
from tests.component.serving import Serving

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("admin", [False, True])
def test_the_router_listens_where_it_is_told_and_nowhere_else(tmp_path: Path, admin: bool) -> None:
    listen = f"127.0.0.1:{free_port()}" if admin else ""
    with Serving(tmp_path, {"admin": {"listen": listen}}) as router:
        router.fleet("127.0.0.1:1")
        router.wait_for("ready")
        listening = {
            f"{each.laddr.ip.removeprefix('::ffff:')}:{each.laddr.port}"  # gRPC's sockets take both families
            for each in psutil.Process(router.pid).net_connections("tcp")
            if each.status == psutil.CONN_LISTEN
        }
    assert listening == {f"127.0.0.1:{router.port}", listen} - {""}
