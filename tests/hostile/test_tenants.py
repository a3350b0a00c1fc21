"""Many sessions of one client: what they can do to others."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

from extproc.core.features import Features, FeatureSettings, extract
from extproc.core.replica import Replica
from extproc.core.request import Request
from extproc.core.router import Router, RouterSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

FLEET = [Replica(f"replica-{number}", f"10.0.0.{number}:8000") for number in range(8)]
OPEN, KEYED = FeatureSettings(), FeatureSettings(secret="known to the deployment alone")


def asked(session: str, settings: FeatureSettings = OPEN, **headers: str) -> Features:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": f"hello from {session}"}]}).encode()
    given: Mapping[str, str] = {"x-session-id": session} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    return extract(Request("POST", "/v1/chat/completions", given, body), settings)


def router(settings: RouterSettings | None = None) -> Router:
    made = Router(settings)
    made.set_members(FLEET, 0.0)
    return made


def home(of: Router, features: Features) -> str:
    """Where it goes while nothing runs."""
    decision = of.decide(features, 0.0)
    assert decision.lease is not None and decision.replica_id is not None
    of.finish(decision.lease, 0.0)
    return decision.replica_id


def aimed_at(target: str) -> list[str]:
    """Sessions whose home is one replica, as anybody can compute them who knows the fleet and no secret."""
    guess = router()
    names = (f"minted-{number}" for number in range(3000))
    return [name for name in names if guess.preference(asked(name))[0] == target]


def test_sessions_that_were_computed_to_meet_on_one_replica_are_spread_by_a_secret() -> None:
    """The algorithm is public, and replicas' ids can be guessed: without a secret the aim is perfect."""
    target = FLEET[0].id
    minted = aimed_at(target)
    assert len(minted) > 200
    keyed = router()
    reached = Counter(home(keyed, asked(name, KEYED)) for name in minted)
    assert reached.keys() == {replica.id for replica in FLEET}
    assert reached[target] < len(minted) / 4


def test_running_requests_that_meet_on_one_replica_do_not_keep_it_from_others() -> None:
    """Without a secret, too: load is weighed against affinity, and what is aimed at one replica spills over."""
    aimed, target = router(), FLEET[0].id
    minted = aimed_at(target)
    went = Counter(aimed.decide(asked(name), 0.0).replica_id for name in minted)
    assert max(went.values()) < len(minted) / 2
    assert len(went) == len(FLEET)


def test_a_flood_of_sessions_takes_no_more_memory_and_moves_nobody() -> None:
    """What the placement memory forgets, the ring knows."""
    settings = RouterSettings(placement_entries=1000)
    small = router(settings)
    residents = {name: home(small, asked(name)) for name in (f"resident-{number}" for number in range(50))}
    for number in range(5000):
        home(small, asked(f"flood-{number}"))
    assert len(small.memory) <= settings.placement_entries
    assert {name: home(small, asked(name)) for name in residents} == residents


def test_a_guessed_session_of_another_tenant_is_another_session() -> None:
    keys = {
        asked("s", KEYED, **headers).conversation_key
        for headers in (
            {},
            {"x_tenant_id": "a"},
            {"x_tenant_id": "b"},
            {"authorization": "Bearer a"},
            {"authorization": "Bearer b"},
            {"x_api_key": "a"},
        )
    }
    assert len(keys) == 6


def test_what_is_shown_of_a_conversation_does_not_lead_to_its_session() -> None:
    """A key is a hash that only the secret can be guessed against."""
    assert asked("s", KEYED).conversation_key != asked("s", OPEN).conversation_key
    assert asked("s", KEYED).rungs != asked("s", OPEN).rungs
