"""Fleets and requests with round numbers, so that tests can show their arithmetic.

A token is 4 bytes here, as it is for a router that has learned nothing yet.
"""

from __future__ import annotations

from blake3 import blake3

from extproc.core.api import Api
from extproc.core.features import Features
from extproc.core.ladder import FIRST_RUNG_BYTES, SIGNATURE_BYTES, Rung
from extproc.core.replica import Replica
from extproc.core.router import Router, RouterSettings

BYTES_PER_TOKEN = 4
OPENING_TOKENS = 25
"""Length of a first user turn: 100 bytes."""


def signature(text: str) -> bytes:
    return blake3(text.encode()).digest(length=SIGNATURE_BYTES)


def replica(number: int, *models: str, weight: float = 1.0, draining: bool = False) -> Replica:
    return Replica(
        f"replica-{number}", f"10.0.{number // 256}.{number % 256}:8000", frozenset(models), weight, draining
    )


def replicas(count: int) -> list[Replica]:
    return [replica(number) for number in range(count)]


def router(*members: Replica, settings: RouterSettings | None = None) -> Router:
    """A router whose members have been there for ever."""
    made = Router(settings)
    made.set_members(members, 0.0)
    return made


def prompt(
    name: str,
    tokens: int,
    *,
    system: str = "",
    system_tokens: int = 0,
    session: str | None = None,
    model: str | None = None,
    streamed: bool = True,
) -> Features:
    """A chat that begins with a system prompt and goes on in its own way.

    Prompts of one name are turns of one conversation: each begins with all shorter ones.
    """
    system_bytes, end_bytes = system_tokens * BYTES_PER_TOKEN, tokens * BYTES_PER_TOKEN
    opening_bytes = min(end_bytes, system_bytes + OPENING_TOKENS * BYTES_PER_TOKEN)
    offsets = {opening_bytes, *([system_bytes] if system else [])}
    offset = FIRST_RUNG_BYTES
    while offset <= end_bytes:
        offsets.add(offset)
        offset *= 2

    def rung(offset_bytes: int) -> Rung:
        text = f"system {system}" if offset_bytes <= system_bytes else f"system {system}, chat {name}"
        return Rung(offset_bytes, signature(f"{text} up to {offset_bytes}"))

    opening = rung(opening_bytes)
    return Features(
        api=Api.CHAT,
        model=model,
        conversation_key=opening.signature if session is None else signature(f"session {session}"),
        conversation_source="prompt" if session is None else "header:x-session-id",
        rungs=tuple(rung(offset) for offset in sorted(offsets)),
        system_rung=rung(system_bytes) if system else None,
        prompt_bytes=end_bytes,
        truncated=False,
        streamed=streamed,
    )


def without_affinity(tokens: int = 0) -> Features:
    """What is left of a request that can't be read."""
    return Features(
        api=Api.OTHER,
        model=None,
        conversation_key=None,
        conversation_source=None,
        rungs=(),
        system_rung=None,
        prompt_bytes=tokens * BYTES_PER_TOKEN,
        truncated=False,
        streamed=False,
    )
