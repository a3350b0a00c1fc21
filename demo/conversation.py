"""Users who talk to the fleet: each turn sends the whole dialogue so far, as chat clients do."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

import aiohttp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TURN_TIMEOUT_S: Final = 120.0
WORDS: Final = (
    *("anchor", "beacon", "cedar", "cobalt", "copper", "drift", "ember", "fable", "garnet", "harbour", "hollow"),
    *("invoice", "island", "jasper", "kettle", "lantern", "ledger", "linen", "marble", "meadow", "nectar", "opal"),
    *("orbit", "quartz", "ribbon", "saddle", "signal", "timber", "velvet", "walnut"),
)


@dataclass(frozen=True, slots=True)
class Way:
    """How requests are balanced: the headers that choose Envoy's route."""

    name: str
    headers: dict[str, str]


ROUND_ROBIN: Final = Way("round robin", {"x-balance": "round_robin"})
AFFINITY: Final = Way("affinity", {})


@dataclass(frozen=True, slots=True)
class Turn:
    """One answered turn. ttft_s: from sending the request to the first piece of text."""

    user: int
    number: int
    replica: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Script:
    """What is played. background_tokens: length of what each user's first message brings along.

    think_s: the longest pause between an answer and the next turn.
    """

    users: int = 6
    turns: int = 4
    background_tokens: int = 4000
    answer_tokens: int = 16
    think_s: float = 0.3
    seed: int = 7


async def play(url: str, model: str, way: Way, script: Script, on_turn: Callable[[Turn], None]) -> list[Turn]:
    """All users at once, each turn by turn. Raises RuntimeError where a turn is not answered with 200.

    No two plays share a prompt, so one does not profit from what an earlier one left in the caches.
    """
    timeout = aiohttp.ClientTimeout(total=TURN_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        talks = [_talk(session, url, model, way, script, user, on_turn) for user in range(script.users)]
        return [turn for turns in await asyncio.gather(*talks) for turn in turns]


async def _talk(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    way: Way,
    script: Script,
    user: int,
    on_turn: Callable[[Turn], None],
) -> list[Turn]:
    chance = random.Random(f"{script.seed} {way.name} {user}")
    background = " ".join(chance.choices(WORDS, k=script.background_tokens * 4 // 7))  # about 7 bytes a word
    messages: list[dict[str, str]] = [
        {"role": "system", "content": f"You answer from these notes of {way.name} user {user}: {background}"}
    ]
    turns = []
    for number in range(1, script.turns + 1):
        await asyncio.sleep(chance.uniform(0.0, script.think_s))
        messages.append({"role": "user", "content": f"Question {number}: what of {chance.choice(WORDS)}?"})
        turn, answer = await _ask(session, url, model, way, script, user, number, messages)
        messages.append({"role": "assistant", "content": answer})
        turns.append(turn)
        on_turn(turn)
    return turns


async def _ask(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    way: Way,
    script: Script,
    user: int,
    number: int,
    messages: Sequence[dict[str, str]],
) -> tuple[Turn, str]:
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": script.answer_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began_s = time.perf_counter()
    ttft_s: float | None = None
    answer, usage = "", dict[str, Any]()
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=way.headers) as response:
        if response.status != 200:
            raise RuntimeError(f"turn {number} of user {user} got {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
            text = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            if text and ttft_s is None:
                ttft_s = time.perf_counter() - began_s
            answer += text
            usage = chunk.get("usage") or usage
        replica = response.headers["x-replica-id"]
    if ttft_s is None:
        ttft_s = time.perf_counter() - began_s
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Turn(user, number, replica, usage["prompt_tokens"], cached, ttft_s), answer


@dataclass(frozen=True, slots=True)
class Summary:
    """What one play came to. hit_rate: cached tokens of all prompt tokens. follow-ups: the turns after the first."""

    hit_rate: float
    mean_ttft_s: float
    follow_up_ttft_s: float
    replicas_per_user: float

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> Summary:
        users = {turn.user for turn in turns}
        return cls(
            hit_rate=sum(turn.cached_tokens for turn in turns) / sum(turn.prompt_tokens for turn in turns),
            mean_ttft_s=fmean(turn.ttft_s for turn in turns),
            follow_up_ttft_s=fmean([turn.ttft_s for turn in turns if turn.number > 1] or [0.0]),
            replicas_per_user=fmean(len({turn.replica for turn in turns if turn.user == user}) for user in users),
        )
