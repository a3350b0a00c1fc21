"""Several observers as one."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn

from extproc.core.replica import Replica
from extproc.core.request import Request
from extproc.core.router import Router
from extproc.observers import Observers
from extproc.picker import EndpointPicker, ResponseStart
from tests.support.watch import Watch

if TYPE_CHECKING:
    import pytest


class Faulty:
    """Raises at every word."""

    def fail(self, *_: Any) -> NoReturn:
        raise RuntimeError("an observer's own trouble")

    decided = response_started = finished = fail


def test_what_one_raises_is_logged_and_costs_neither_the_request_nor_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    router, watch = Router(), Watch()
    router.set_members([Replica("a", "10.0.0.1:8000")], monotonic())
    picker = EndpointPicker(router, observer=Observers(Faulty(), watch))
    pick = picker.pick(Request("POST", "/v1/chat/completions", {}, b"{}"), None)
    pick.response_started(ResponseStart(200, True, None, None, None, None))
    pick.finish()
    assert len(watch.decisions) == len(watch.starts) == 1
    assert router.open_leases == 0
    assert caplog.text.count("an observer failed") == 3
