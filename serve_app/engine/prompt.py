"""From an OpenAI request to the engine's tokens.

The simulated tokenizer is a fixed cut: every token is 4 bytes, about what BPE vocabularies average on
English text (OpenAI's rule of thumb: "1 token ~= 4 chars"). So a token sequence is simply `bytes` whose
length is a multiple of 4. What matters of a real tokenizer is kept: special tokens (role markers) never merge
with the text around them. So each segment is padded to whole tokens by itself, and a dialogue that grows by a
turn extends its token sequence instead of shifting it.
"""

from __future__ import annotations

import json
import random
import zlib
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN_BYTES = 4
_END_OF_TURN = b"\x03\0\0\0"


class PromptError(ValueError):
    """The request has no prompt that an engine could read; the message is for the client."""


def token_count(tokens: bytes) -> int:
    return len(tokens) // TOKEN_BYTES


def chat_tokens(body: dict[str, Any]) -> bytes:
    """Tokens of a chat request, in the order in which chat templates render it: tools, then the messages.

    Ends with the assistant's marker, so that prompt + generated text is the head of the next turn's prompt.

    Raises PromptError: `messages` is missing, empty or not a list of messages.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise PromptError("'messages' must be a non-empty array")
    segments: list[bytes] = []
    if tools := body.get("tools"):
        segments += (_marker("tools"), _text(_json(tools)), _END_OF_TURN)
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise PromptError("each message must be an object with a 'role'")
        segments += (_marker(message["role"]), _text(_content(message.get("content"))))
        segments += (_text(_json(message[name])) for name in ("tool_calls", "tool_call_id") if message.get(name))
        segments.append(_END_OF_TURN)
    segments.append(_marker("assistant"))
    return b"".join(segments)


def completion_tokens(body: dict[str, Any]) -> list[bytes]:
    """Tokens of each prompt of a completions request: a string, token ids, or a list of either.

    Raises PromptError: `prompt` is none of these.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [_text(prompt)]
    if isinstance(prompt, list) and prompt:
        if _all_ids(prompt):
            return [_ids(prompt)]
        if all(isinstance(item, str) for item in prompt):
            return [_text(item) for item in prompt]
        if all(isinstance(item, list) and item and _all_ids(item) for item in prompt):
            return [_ids(item) for item in prompt]
    raise PromptError("'prompt' must be a string, an array of strings, token ids, or an array of token ids")


def words(prompt: bytes, count: int) -> Iterator[str]:
    """`count` generated tokens, the same for the same prompt on every replica: three letters and a space.

    Each is exactly one token of the simulated tokenizer, so `usage` and a re-tokenised answer agree.
    """
    dice = random.Random(zlib.crc32(prompt))
    for left in range(count, 0, -1):
        word = dice.choice("bdfgklmnprstvz") + dice.choice("aeiou") + dice.choice("lmnrst")
        yield word + (" " if left > 1 else ".")


def _marker(role: str) -> bytes:
    return _padded(b"\x02" + role.encode("utf-8", "surrogatepass"))


def _text(text: str) -> bytes:
    return _padded(text.encode("utf-8", "surrogatepass"))


def _padded(segment: bytes) -> bytes:
    return segment + bytes(-len(segment) % TOKEN_BYTES)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _content(content: object) -> str:
    """A message's content as text; anything that isn't text (images, audio) by the digest of its JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise PromptError("'content' must be a string or an array of parts")
    return "".join(_part(part) for part in content)


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise PromptError("each content part must be an object")
    text = part.get("text")
    if isinstance(text, str):
        return text
    return blake2b(_json(part).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _all_ids(items: list[Any]) -> bool:
    return all(type(item) is int and 0 <= item < 1 << 32 for item in items)


def _ids(ids: list[int]) -> bytes:
    return b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in ids)
