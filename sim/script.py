"""A workload as requests that can be sent: turns with the text of their prompts.

Turns know their prompts by blocks, so the text is made from those: equal where the blocks are, and nowhere else.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from extproc.core.api import Api
from sim.transcript import BYTES_PER_TOKEN
from sim.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.turn import Turn


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One request.

    turn: as simulated. What an engine answers is not what the workload's next prompt says was answered, so its
        blocks end with its prompt: nobody finds an answer in a cache.
    labels: of the whole blocks of the prompt and of what is left behind them. block_tokens: their length.
    ends: where its messages end, in tokens from the beginning of the prompt.
    """

    turn: Turn
    labels: tuple[int | str, ...]
    block_tokens: int
    ends: tuple[int, ...]

    @property
    def path(self) -> str:
        """Completions where the turn is a prompt without messages, as in a trace."""
        return "/v1/chat/completions" if self._chat else "/v1/completions"

    def headers(self, salt: str) -> dict[str, str]:
        """The session, where the client names it."""
        features = self.turn.features
        kind, _, name = (features.conversation_source or "").partition(":")
        return (
            {name: f"{salt}-{features.conversation_key.hex()}"}
            if kind == "header" and features.conversation_key
            else {}
        )

    def body(self, model: str, salt: str) -> dict[str, Any]:
        """What an OpenAI client sends. salt: prompts of different ones have no beginning in common."""
        text = self._text(salt)
        prompt: dict[str, Any] = {"prompt": text}
        if self._chat:
            first = ("system",) if self.turn.features.system_rung else ()
            roles = itertools.chain(first, itertools.cycle(("user", "assistant")))
            cuts = itertools.pairwise((0, *(end * BYTES_PER_TOKEN for end in self.ends)))
            prompt = {
                "messages": [{"role": role, "content": text[a:b]} for role, (a, b) in zip(roles, cuts, strict=False)]
            }
        return {
            "model": model,
            **prompt,
            "max_tokens": self.turn.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    @property
    def _chat(self) -> bool:
        return self.turn.features.api is Api.CHAT

    def _text(self, salt: str) -> str:
        """One byte a character, four a token."""
        text = "".join(_filler(f"{salt} {label}", self.block_tokens) for label in self.labels)
        if system := self.turn.features.system_rung:
            # The last block of a shared system prompt may hold the beginning of a question that is not shared.
            begin = system.offset_bytes - system.offset_bytes % (self.block_tokens * BYTES_PER_TOKEN)
            shared = _filler(f"{salt} {system.signature.hex()}", self.block_tokens)
            text = text[:begin] + shared[: system.offset_bytes - begin] + text[system.offset_bytes :]
        return text[: self.turn.prompt_tokens * BYTES_PER_TOKEN]


def write(workload: Workload, requests: int, speedup: float = 1.0, max_tokens: int | None = None) -> list[list[Line]]:
    """The first `requests` of a workload, conversation by conversation, in order of their first turns.

    speedup: divides all pauses. max_tokens: no answer is longer.
    """
    left = requests
    script = []
    for number, head in enumerate(workload.turns):
        lines = _conversation(head, number, workload.block_tokens, speedup, max_tokens)
        conversation = list(itertools.islice(lines, left))
        left -= len(conversation)
        script.append(conversation)
        if not left:
            break
    return script


def as_workload(name: str, script: list[list[Line]]) -> Workload:
    """The same requests for the simulator."""
    heads = []
    for lines in script:
        following: Turn | None = None
        for line in reversed(lines):
            following = dataclasses.replace(line.turn, then=following)
        assert following is not None
        heads.append(following)
    return Workload(name, script[0][0].block_tokens, heads)


def _conversation(head: Turn, number: int, block_tokens: int, speedup: float, max_tokens: int | None) -> Iterator[Line]:
    system = head.features.system_rung
    ends: tuple[int, ...] = (system.offset_bytes // BYTES_PER_TOKEN,) if system else ()
    turn: Turn | None = head
    while turn is not None:
        ends += (turn.prompt_tokens,)
        whole = turn.prompt_tokens // block_tokens
        # What stands behind the last whole block goes on in the next turn's prompt, if there is one.
        rest = turn.blocks[whole] if len(turn.blocks) > whole else f"end of {number}.{turn.number}"
        played = dataclasses.replace(
            turn,
            at_s=turn.at_s / speedup,
            output_tokens=min(turn.output_tokens, max_tokens or turn.output_tokens),
            blocks=turn.blocks[:whole],
            then=None,
        )
        yield Line(played, (*played.blocks, rest), block_tokens, ends)
        ends += (turn.prompt_tokens + turn.output_tokens,)
        turn = turn.then


def _filler(label: str, tokens: int) -> str:
    """Text of so many tokens that depends on nothing but its label."""
    return blake3(label.encode()).hexdigest(length=tokens * BYTES_PER_TOKEN // 2)
