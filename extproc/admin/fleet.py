"""What the router knows of its fleet, as JSON."""

from __future__ import annotations

import asyncio
import json
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from extproc.core.load import ReplicaLoad
    from extproc.core.router import Router
    from extproc.membership import Membership

AT_ONCE: Final = 50
"""Replicas, about 1 ms: decisions come between. A thousand at a stretch would hold them up for 15 ms."""


def to_text(value: Any) -> str:
    """JSON in ASCII, since an id or a model's name may hold what UTF-8 can't (lone surrogates)."""
    return json.dumps(value, separators=(",", ":"))


async def replicas_text(router: Router, membership: Membership) -> str:
    """A JSON array with an object for each member, in the order of their ids (`_replica_json`)."""
    now_s = monotonic()
    draining = {replica.id for replica in membership.listed if replica.draining}
    texts = []
    for replica_id, load in sorted(router.loads.items()):
        texts.append(to_text(_replica_json(load, replica_id in draining, router, now_s)))
        if len(texts) % AT_ONCE == 0:
            await asyncio.sleep(0)
    return f"[{','.join(texts)}]"


def router_json(router: Router, membership: Membership) -> dict[str, Any]:
    """The router itself."""
    settings = router.settings
    last_read_s = membership.last_read_s
    return {
        "policy": settings.policy.value,
        "saturation_in_flight": settings.saturation_in_flight,
        "membership_source": membership.settings.source.value,
        "membership_version": router.membership_version,
        "membership_stale": router.membership_stale,
        "membership_failures": membership.failures,
        "membership_age_s": round(monotonic() - last_read_s, 2) if last_read_s is not None else None,
        "open_leases": router.open_leases,
        "placement_entries": len(router.memory),
        "placement_bytes": router.memory.size_bytes,
        "bytes_per_token": round(router.bytes_per_token, 2),
    }


def _replica_json(load: ReplicaLoad, leaves: bool, router: Router, now_s: float) -> dict[str, Any]:
    """state: "ready", "draining" (the feed says so) or "unwell" (its health does); the last two get nothing new.

    work_tokens: expected work before a new request, at this replica's pace; `pace` is above 1 for a slow one.
    hit_rate: 0..1, since the engine's start. engine_age_s: of its own figures, None: none yet.
    """
    replica, engine = load.replica, load.engine
    computed = engine.prompt_tokens_computed if engine is not None else None
    cached = engine.prompt_tokens_cached if engine is not None else None
    total = computed + cached if computed is not None and cached is not None else 0
    age_s = now_s - load.engine_s
    return {
        "id": replica.id,
        "endpoint": replica.endpoint,
        "models": sorted(replica.models),
        "route_prefix": replica.route_prefix,
        "state": "draining" if leaves else "unwell" if replica.draining else "ready",
        "weight": replica.weight,
        "pace": round(load.pace, 3),
        "in_flight": load.in_flight,
        "others_in_flight": load.others_in_flight,
        "queued": load.queued,
        "work_tokens": round(load.work_tokens(), 1),
        "prefill_tokens_per_s": round(load.prefill_tokens_per_s),
        "capacity_tokens": load.capacity_tokens,
        "running": engine.running if engine is not None else None,
        "waiting": engine.waiting if engine is not None else None,
        "kv_usage": round(engine.kv_usage, 4) if engine is not None and engine.kv_usage is not None else None,
        "prompt_tokens_computed": computed,
        "prompt_tokens_cached": cached,
        "hit_rate": round(cached / total, 4) if total and cached is not None else None,
        "engine_age_s": round(age_s, 2) if engine is not None else None,
        "stale": engine is not None and age_s > router.settings.load_stale_s,
    }
