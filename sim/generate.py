"""Workloads that are generated: what users, applications and agents send, as distributions with units.

Rates are per replica, so that a workload means the same load at any size of the fleet. A conversation's next turn
comes a while after the answer to the one before has ended, as with people and agents, so a slow fleet is asked less.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sim.transcript import Transcript
from sim.turn import Turn
from sim.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK_TOKENS: Final = 64
"""Four of vLLM's blocks: a prompt's unaligned end costs 3 ms more on the average, the simulation a quarter."""


REQUESTS: Final = 12_000
"""As many as in Mooncake's conversation trace."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of a workload. speedup: multiplies the rate of conversations."""

    replicas: int
    requests: int = REQUESTS
    speedup: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a prompt. label: equal ones are equal text."""

    label: int
    tokens: int


class Writer:
    """Writes conversations. Everything random comes from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._labels = itertools.count(1_000_000)
        self._sessions = itertools.count()

    def own(self, tokens: float) -> Piece:
        """A piece that nobody else has."""
        return Piece(next(self._labels), max(1, round(tokens)))

    def tokens(self, median: float, sigma: float, most: int = 100_000) -> int:
        """A length, log-normal, as lengths of questions and answers are. sigma: of the logarithm."""
        return min(most, max(1, round(self.random.lognormvariate(math.log(median), sigma))))

    def conversation(
        self,
        at_s: float,
        system: Piece | None,
        exchanges: Iterator[tuple[Piece, int, float]],
        *,
        named: bool = False,
    ) -> Turn:
        """A conversation that begins at `at_s`.

        exchanges: (question, tokens of the answer, seconds after the answer before). named: with a session id.
        """
        transcript = Transcript(BLOCK_TOKENS)
        session = next(self._sessions) if named else None
        if system is not None:
            transcript.append(system.label, system.tokens)
            transcript.end_system()
        first: Turn | None = None
        last: Turn | None = None
        for number, (question, answer_tokens, pause_s) in enumerate(exchanges):
            transcript.append(question.label, question.tokens)
            if first is None:
                transcript.end_opening()
            turn = Turn(
                at_s if first is None else pause_s,
                transcript.tokens,
                answer_tokens,
                transcript.blocks,
                transcript.features(session),
                number,
            )
            if last is None:
                first = turn
            else:
                last.then = turn
            last = turn
            answer = self.own(answer_tokens)
            transcript.append(answer.label, answer.tokens)
        if first is None:
            raise ValueError("a conversation has at least one exchange")
        return first

    def poisson(self, rate_per_s: float) -> Iterator[float]:
        """Moments of arrivals."""
        at_s = 0.0
        while True:
            at_s += self.random.expovariate(rate_per_s)
            yield at_s


def dialogue(scale: Scale) -> Workload:
    """The article's: 1,000 users over 32 replicas, five turns each, 4,000 tokens of history, a session id.

    All are there from the start, each thinks about 20 s between an answer and the next question.
    """
    writer = Writer(scale.seed)
    users = round(1000 / 32 * scale.replicas * scale.speedup)
    think_s = 20.0
    system = writer.own(1024)

    def exchanges() -> Iterator[tuple[Piece, int, float]]:
        for number in range(5):
            question = 2976 if not number else writer.tokens(30, 0.7)
            yield writer.own(question), writer.tokens(150, 0.5), writer.random.expovariate(1 / think_s)

    turns = [
        writer.conversation(writer.random.uniform(0, think_s), system, exchanges(), named=True) for _ in range(users)
    ]
    return _workload("dialogue", turns)


def _tenants(name: str, scale: Scale, tenants: int, system_tokens: int, zipf: float, rate: float) -> Workload:
    writer = Writer(scale.seed)
    systems = [writer.own(system_tokens) for _ in range(tenants)]
    weights = [1 / rank**zipf for rank in range(1, tenants + 1)]

    def exchanges() -> Iterator[tuple[Piece, int, float]]:
        for _ in range(5):
            yield writer.own(writer.tokens(80, 0.8)), writer.tokens(150, 0.6), writer.random.expovariate(1 / 15)

    starts = itertools.islice(writer.poisson(rate * scale.replicas * scale.speedup), scale.requests // 5)
    turns = [writer.conversation(at_s, writer.random.choices(systems, weights)[0], exchanges()) for at_s in starts]
    return _workload(name, turns)


def tenants(scale: Scale) -> Workload:
    """1,000 tenants (Zipf 0.9) with system prompts of 4,096 tokens: more than one cache holds; chats of five turns."""
    return _tenants("tenants", scale, 1000, 4096, 0.9, rate=0.45)


def few_tenants(scale: Scale) -> Workload:
    """20 tenants with long system prompts (8,192 tokens); chats of five turns."""
    return _tenants("few_tenants", scale, 20, 8192, 0.9, rate=0.45)


def agents(scale: Scale) -> Workload:
    """Agents: 6,000 tokens of tools and instructions that eight kinds share, 10 to 30 calls whose results pile up."""
    writer = Writer(scale.seed)
    kinds = [writer.own(6000) for _ in range(8)]

    def exchanges() -> Iterator[tuple[Piece, int, float]]:
        for number in range(writer.random.randint(10, 30)):
            question = writer.tokens(600, 0.8) if not number else writer.tokens(500, 1.2, 16_000)
            yield writer.own(question), writer.tokens(120, 0.7), writer.tokens(20, 0.8) / 10

    starts = itertools.islice(writer.poisson(0.035 * scale.replicas * scale.speedup), scale.requests // 20)
    return _workload("agents", [writer.conversation(at_s, writer.random.choice(kinds), exchanges()) for at_s in starts])


def single_turn(scale: Scale) -> Workload:
    """One question each, nothing shared: affinity has nothing to give here, and must not take."""
    writer = Writer(scale.seed)
    starts = itertools.islice(writer.poisson(1.8 * scale.replicas * scale.speedup), scale.requests)
    return _workload("single_turn", [_single(writer, at_s, None, writer.tokens(2000, 0.9)) for at_s in starts])


def hot_prefix(scale: Scale) -> Workload:
    """One system prompt of 4,096 tokens for everyone, short questions, one turn."""
    writer = Writer(scale.seed)
    system = writer.own(4096)
    starts = itertools.islice(writer.poisson(3.0 * scale.replicas * scale.speedup), scale.requests)
    return _workload("hot_prefix", [_single(writer, at_s, system, writer.tokens(120, 0.8)) for at_s in starts])


def bursts(scale: Scale) -> Workload:
    """Chats of four turns; every minute, for six seconds, five times as many begin."""
    writer = Writer(scale.seed)
    systems = [writer.own(2048) for _ in range(10)]

    def exchanges() -> Iterator[tuple[Piece, int, float]]:
        for number in range(4):
            question = writer.tokens(800, 0.8) if not number else writer.tokens(100, 0.8)
            yield writer.own(question), writer.tokens(200, 0.6), writer.random.expovariate(1 / 12)

    def starts() -> Iterator[float]:
        for at_s in writer.poisson(5 * 0.5 * scale.replicas * scale.speedup):
            if at_s % 60 < 6 or writer.random.random() < 1 / 5:
                yield at_s

    chosen = itertools.islice(starts(), scale.requests // 4)
    return _workload(
        "bursts", [writer.conversation(at_s, writer.random.choice(systems), exchanges()) for at_s in chosen]
    )


def heavy_tail(scale: Scale) -> Workload:
    """Chats whose first prompt is anything from a line to a book (Pareto, index 1.1, at most 100,000 tokens)."""
    writer = Writer(scale.seed)

    def exchanges() -> Iterator[tuple[Piece, int, float]]:
        for number in range(writer.random.choice((1, 1, 2, 3, 5))):
            question = min(100_000, 500 * writer.random.paretovariate(1.1)) if not number else writer.tokens(60, 0.8)
            yield writer.own(question), writer.tokens(200, 1.0, 4000), writer.random.expovariate(1 / 20)

    starts = itertools.islice(writer.poisson(0.8 * scale.replicas * scale.speedup), int(scale.requests / 2.4))
    return _workload("heavy_tail", [writer.conversation(at_s, None, exchanges()) for at_s in starts])


def _single(writer: Writer, at_s: float, system: Piece | None, question_tokens: int) -> Turn:
    exchange = writer.own(question_tokens), writer.tokens(100, 0.6), 0.0
    return writer.conversation(at_s, system, iter((exchange,)))


def _workload(name: str, turns: list[Turn]) -> Workload:
    return Workload(name, BLOCK_TOKENS, sorted(turns, key=lambda turn: turn.at_s))


WORKLOADS: Final[dict[str, Callable[[Scale], Workload]]] = {
    make.__name__: make
    for make in (dialogue, tenants, few_tenants, agents, single_turn, hot_prefix, bursts, heavy_tail)
}
"""By name."""
