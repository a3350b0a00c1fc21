"""Our router with a part taken away or set otherwise, to see what the part is worth."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from extproc.core.settings import RouterSettings
from sim.policies.core_router import CoreRouter

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.core.features import Features


def _first_rung_only(features: Features) -> Features:
    return dataclasses.replace(features, rungs=features.rungs[:1])


ABLATIONS: Final[dict[str, Callable[[], CoreRouter]]] = {
    "everything": CoreRouter,
    "no ladder: the first rung only": lambda: CoreRouter(see=_first_rung_only),
    "no placement memory": lambda: CoreRouter(RouterSettings(placement_entries=1)),
    "level 1 only: the prefix's home": lambda: CoreRouter(RouterSettings(session_candidates=0, holder_candidates=0)),
    "level 2 only: the conversation": lambda: CoreRouter(RouterSettings(home_candidates=0, holder_candidates=0)),
    "no token ledger: requests in flight only": lambda: CoreRouter(ledger=False),
    "saturation line at 16 in flight, not 64": lambda: CoreRouter(RouterSettings(saturation_in_flight=16)),
    "a request in flight weighs 64 tokens, not 256": lambda: CoreRouter(RouterSettings(decode_tokens=64.0)),
    "two members of a home weighed, not one": lambda: CoreRouter(RouterSettings(home_candidates=2)),
    "one holder weighed, not two": lambda: CoreRouter(RouterSettings(holder_candidates=1)),
    "no weight on reuse": lambda: CoreRouter(RouterSettings(reuse_weight=0.0)),
    "no first-token signal": lambda: CoreRouter(first_token_signal=False),
    "4 routers": lambda: CoreRouter(routers=4),
    "8 routers": lambda: CoreRouter(routers=8),
}
"""By what is different."""
