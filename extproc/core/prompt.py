"""Prompt: the request's prompt as one byte stream, in the order in which a chat template renders it.

    documents and other template input | tools | system | turn | turn | ...

The stream is what signatures are taken of, so it follows what the engine's cache follows: two requests whose
rendered prompts begin alike should have streams that begin alike. It is not the rendered prompt (that would need
each model's template) and it keeps two rules instead:

- It only grows. Marks stand before things, never after, and say no lengths, so a dialogue's next turn, or the
  rest of a body that was cut off, extends the stream and changes nothing before.
- Where two renderings can't be told apart, they are taken as equal. To think that a replica holds a prompt that it
  does not hold costs what any cold request costs; to miss one that it does hold costs a prefill.

So equal text is equal however it was spelled (string or parts, JSON escapes, key order, chat or responses or
messages API), and what a template leaves out (sampling options, cache_control, image detail) is left out.
"""

from __future__ import annotations

import json
import sys
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blake3 import blake3

from extproc.core.api import Api
from extproc.core.document import last_key

if TYPE_CHECKING:
    from extproc.core.document import Document
    from extproc.core.mask import Mask

# Marks are control characters, which text has no use for.
_AHEAD, _EXTRA, _TURN, _UNIT, _MEDIA = "\x1c", "\x1d", "\x1e", "\x1f", "\x1a"

# Where each dialect keeps its turns, and the text that its engine renders as a leading system message.
_TURNS = {
    Api.CHAT: ("messages", None),
    Api.MESSAGES: ("messages", "system"),
    Api.RESPONSES: ("input", "instructions"),
    Api.EMBEDDINGS: ("messages", None),
}
_TEXTS = {Api.COMPLETIONS: ("prompt", "prompt_embeds"), Api.EMBEDDINGS: ("input",)}

# One role by two names: OpenAI renamed `system` to `developer` and takes either for the other.
_ROLE_NAMES = {"developer": "system"}
# Items of the Responses API that have a type in place of a role.
_ROLE_OF_TYPE = {"function_call": "assistant", "function_call_output": "tool", "reasoning": "assistant"}

# What a turn has beside its content, in the order in which it is written.
_EXTRAS = (
    "reasoning",
    "reasoning_content",
    "summary",
    "tool_calls",
    "function_call",
    "name",
    "arguments",
    "call_id",
    "tool_call_id",
    "refusal",
    "audio",
)
_EXTRA_NAMES = frozenset(_EXTRAS)

# Content parts that are rendered as text; all others are media and count by their content's digest.
_WRITTEN_PARTS = frozenset({"tool_use", "thinking", "redacted_thinking", "refusal"})
# What a part may carry that the model does not see.
_UNSEEN = frozenset({"cache_control", "detail", "type"})

# Claude Code opens its system prompt with a block that differs in each request. vLLM leaves it out of the prompt
# (vllm-project/vllm#36829), and so must the key.
_BILLING_BLOCK = "x-anthropic-billing-header"

_canonical_json = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode


@dataclass(slots=True)
class Prompt:
    """A prompt's stream and its boundaries, both byte offsets in it.

    system_end: the end of tools and leading system turns; None where there are neither or they were cut off.
    opening_end: the end of the first user turn; None where there is none or it was cut off.
    dialogue: it consists of turns and so has an opening, even if the cut hides it.
    """

    stream: bytes
    system_end: int | None = None
    opening_end: int | None = None
    dialogue: bool = True


def canonical_prompt(api: Api, document: Document, template_fields: tuple[str, ...], mask: Mask) -> Prompt | None:
    """The prompt of a request, or of as much of it as was seen; None where there is none."""
    writer = _Writer(mask)
    if api in _TURNS and (api is not Api.EMBEDDINGS or "messages" in document.fields):
        prompt = writer.dialogue(document, *_TURNS[api], template_fields)
    elif api in _TEXTS:
        prompt = writer.texts(document, _TEXTS[api])
    else:
        return None
    return prompt if prompt.stream else None


class _Writer:
    """Writes one prompt. `open_` means of any value: it was cut off, so write only what its rest can't change."""

    __slots__ = ("_chunks", "_mask", "_pieces", "_size")

    def __init__(self, mask: Mask) -> None:
        self._mask = mask
        self._pieces: list[str] = []
        self._chunks: list[bytes] = []
        self._size = 0

    def _offset(self) -> int:
        """The stream's length so far, in bytes."""
        chunk = "".join(self._pieces).encode("utf-8", "surrogatepass")
        self._pieces.clear()
        self._chunks.append(chunk)
        self._size += len(chunk)
        return self._size

    def _stream(self) -> bytes:
        self._offset()
        return b"".join(self._chunks)

    # -- dialogues ---------------------------------------------------------------------------------------------

    def dialogue(
        self, document: Document, turns_field: str, system_field: str | None, template_fields: tuple[str, ...]
    ) -> Prompt:
        for name in template_fields:
            if document.fields.get(name) is not None:
                if name == document.open_key:
                    return Prompt(self._stream())
                self._pieces += (_AHEAD, name, _UNIT, self._json(document.fields[name]))
        has_system = False
        for name in ("tools", "functions"):
            tools_open = name == document.open_key
            for tool in _settled_items(document.fields.get(name), tools_open):
                has_system = True
                self._pieces += (_AHEAD, "tool", _UNIT, self._json(_without_cache_mark(tool)))
            if tools_open:
                return Prompt(self._stream())

        leading, system_end, opening_end = True, None, None
        turns, cut = _turns(document, turns_field, system_field)
        pieces, mask = self._pieces, self._mask
        for place, turn in enumerate(turns, 1):
            turn_open = cut and place == len(turns)
            if opening_end is not None and len(turn) == 2 and not turn_open:
                whose, text = turn.get("role"), turn.get("content")
                if isinstance(whose, str) and isinstance(text, str):  # so is nearly every turn
                    pieces += (_TURN, _ROLE_NAMES.get(whose, whose), _UNIT, mask(text))
                    continue
            role = _role(turn, turn_open)
            if role is None:
                break
            if leading and role != "system":
                leading = False
                system_end = self._offset() if has_system else None
            has_system = has_system or leading
            self._turn(role, turn, turn_open)
            if turn_open:
                break
            if role == "user" and opening_end is None:
                opening_end = self._offset()
        else:
            if leading and has_system and _turns_complete(document, turns_field, system_field):
                system_end = self._offset()
        return Prompt(self._stream(), system_end, opening_end)

    def _turn(self, role: str, turn: dict[str, object], open_: bool) -> None:
        field = "content" if "content" in turn else "output"
        self._pieces += (_TURN, role, _UNIT)
        self._content(turn.get(field), open_ and last_key(turn) == field)
        if open_ or _EXTRA_NAMES.isdisjoint(turn):
            return
        for name in _EXTRAS:
            extra = turn.get(name)
            if extra:
                self._pieces += (_EXTRA, name, _UNIT, self._text_or_json(extra))

    def _content(self, content: object, open_: bool) -> None:
        """Write a turn's content. Parts are joined by line feeds, as vLLM does for templates that take a string."""
        if content is None:
            return
        if isinstance(content, str):
            self._pieces.append(self._mask(content, open_))
            return
        parts = content if isinstance(content, list) else [content]
        separator = ""
        for place, part in enumerate(parts, 1):
            mark = len(self._pieces)
            self._pieces.append(separator)
            if self._part(part, open_ and place == len(parts)):
                separator = "\n"
            else:
                del self._pieces[mark:]

    def _part(self, part: object, open_: bool) -> bool:
        """Write one part of a content; False if there is nothing to write."""
        if isinstance(part, str):
            self._pieces.append(self._mask(part, open_))
            return True
        if not isinstance(part, dict):
            if not open_:
                self._pieces.append(self._json(part))
            return not open_
        cut = last_key(part) if open_ else None
        text = part.get("text")
        if isinstance(text, str):
            if text.startswith(_BILLING_BLOCK):
                return False
            if cut == "text" and _BILLING_BLOCK.startswith(text):
                return False
            self._pieces.append(self._mask(text, cut == "text"))
            return True
        kind = part.get("type")
        if kind == "tool_result" and cut in (None, "content") and cut != "type":
            self._pieces += (_EXTRA, kind, _UNIT)
            self._content(part.get("content"), open_)
            if not open_:
                self._pieces += (_UNIT, self._text_or_json(part.get("tool_use_id")))
            return True
        if open_:
            return False
        if kind in _WRITTEN_PARTS:
            self._pieces += (_EXTRA, self._json(_without_cache_mark(part)))
        else:
            self._pieces += (_MEDIA, self._text_or_json(kind), _UNIT, _content_digest(part))
        return True

    # -- plain texts and token ids -----------------------------------------------------------------------------

    def texts(self, document: Document, fields: tuple[str, ...]) -> Prompt:
        for name in fields:
            if document.fields.get(name) is not None:
                self._text(document.fields[name], name == document.open_key)
        return Prompt(self._stream(), dialogue=False)

    def _text(self, value: object, open_: bool) -> None:
        """Write a text, token ids (4 bytes each, about as much as the text they stand for), or a list of either."""
        if isinstance(value, str):
            self._pieces.append(self._mask(value, open_))
        elif isinstance(value, list) and value and not isinstance(value[0], str | list | dict):
            self._offset()
            token_ids = _token_bytes(value[:-1] if open_ else value)
            self._chunks.append(token_ids)
            self._size += len(token_ids)
        elif isinstance(value, list):
            for place, one in enumerate(value, 1):
                if place > 1:
                    self._pieces.append(_TURN)
                self._text(one, open_ and place == len(value))
        elif not open_:
            self._pieces.append(self._json(value))

    # -- values ------------------------------------------------------------------------------------------------

    def _json(self, value: object) -> str:
        return self._mask(_canonical_json(value))

    def _text_or_json(self, value: object) -> str:
        return self._mask(value) if isinstance(value, str) else self._json(value)


def _turns(document: Document, turns_field: str, system_field: str | None) -> tuple[list[dict[str, object]], bool]:
    """The turns, and whether the last is cut off. A text in the place of turns is one turn of the user."""
    leading: list[dict[str, object]] = []
    if system_field is not None:
        system = document.fields.get(system_field)
        if system:
            leading = [{"role": "system", "content": system}]
        if system_field == document.open_key:
            return leading, bool(leading)
    turns = document.fields.get(turns_field)
    if isinstance(turns, str | dict):
        turns = [turns]
    if not isinstance(turns, list) or not turns:
        return leading, False
    turns = [turn if isinstance(turn, dict) else {"role": "user", "content": turn} for turn in turns]
    return leading + turns, turns_field == document.open_key


def _turns_complete(document: Document, turns_field: str, system_field: str | None) -> bool:
    """Whether no further turn can follow those that were seen."""
    if not document.open:
        return True
    return turns_field in document.fields and document.open_key not in (turns_field, system_field)


def _role(turn: dict[str, object], open_: bool) -> str | None:
    """Whose turn it is. None: the cut came before that was said."""
    cut = last_key(turn) if open_ else None
    role = turn.get("role")
    if role is not None:
        if cut == "role":
            return None
        return _ROLE_NAMES.get(role, role) if isinstance(role, str) else _canonical_json(role)
    kind = turn.get("type")
    if isinstance(kind, str) and cut != "type" and (kind in _ROLE_OF_TYPE or not open_):
        return _ROLE_OF_TYPE.get(kind, kind)
    return None if open_ else ""


def _without_cache_mark(value: object) -> object:
    """Anthropic's marks move on with each turn, and no template renders them."""
    if isinstance(value, dict) and "cache_control" in value:
        return {name: field for name, field in value.items() if name != "cache_control"}
    return value


def _settled_items(items: object, open_: bool) -> list[object]:
    if items is None:
        return []
    if not isinstance(items, list):
        return [] if open_ else [items]
    return items[:-1] if open_ else items


def _token_bytes(token_ids: list[object]) -> bytes:
    try:
        words = array("I", token_ids)  # type: ignore[type-var]  # TypeError is what is wanted of others
    except (TypeError, OverflowError):
        return _canonical_json(token_ids)[1:-1].encode("utf-8", "surrogatepass")
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _content_digest(part: dict[str, object]) -> str:
    """The BLAKE3 of a media part by its content, 32 hexadecimal digits. A URL stands for what it points to."""
    hasher = blake3()

    def feed(value: object) -> None:
        if isinstance(value, dict):
            for name in sorted(value.keys() - _UNSEEN):
                feed(name)
                feed(value[name])
        elif isinstance(value, list):
            for one in value:
                feed(one)
        else:
            text = value if isinstance(value, str) else _canonical_json(value)
            hasher.update(text.encode("utf-8", "surrogatepass") + b"\x00")

    feed(part)
    return hasher.digest(length=16).hex()
