"""The prompt as one canonical byte stream, in the order in which a chat template renders it.

    template extras, tools, leading system messages | first user turn | the rest
                                        system_end -^     opening_end -^

The stream stands for what the engine will tokenize without knowing its template: two requests whose rendered prompts
begin alike have streams that begin alike, and a dialogue that grows only appends. Control characters separate
what a template would separate, rather than length prefixes, since a length would change the stream's beginning
when its end grows. Images, audio and files count by a digest of what the request says of them; token ids as four
bytes each, about as much as the text of a token.

A body may be cut off. What its head shows is the beginning of what the whole would give: the last value on the open
path of a cut document is unfinished, so a cut text ends the stream, and a cut number, tool or picture is left out.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from blake3 import blake3

from extproc.core.api import Api

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Mask = Callable[[str], str]

ITEM: Final = b"\x1d"
TURN: Final = b"\x1e"
CONTENT: Final = b"\x1f"
MEDIA: Final = b"\x1c"

TEMPLATE_EXTRAS: Final = ("chat_template", "chat_template_kwargs", "documents", "reasoning_effort")
"""Fields that vLLM hands to the chat template, which renders them at its head."""
SCHEMAS: Final = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_grammar")
"""Fields that constrain sampling; vLLM's templates don't render them, other engines' may."""
SYSTEM_ROLES: Final = frozenset({"system", "developer"})
UNRENDERED: Final = frozenset({"role", "content", "type", "id", "status"})
"""Fields of a turn that are rendered apart, or (the last three, of the responses API's items) not at all."""
BILLING_BLOCK: Final = "x-anthropic-billing-header"
"""Claude Code opens its system prompt with a block that differs between requests; vLLM leaves it out
(vllm-project/vllm#36829), and so must the key.
"""
TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text"})
MEDIA_PARTS: Final = frozenset(
    {"image", "image_url", "image_embeds", "input_image"}
    | {"audio", "audio_url", "input_audio", "video", "video_url"}
    | {"document", "file", "input_file"}
)
UNMASKED_TAIL_CHARS: Final = 64
"""A span to be masked may be cut in two by the end of a head; nothing that is masked by name is longer."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """stream: the canonical bytes. system_end, opening_end: boundaries in it, None where there are none (or cut off).

    has_turns: whether the API has turns at all; a completion's prompt has none.
    """

    stream: bytes
    system_end: int | None
    opening_end: int | None
    has_turns: bool


class _Cut(Exception):
    """The head ends here."""


class _Stream:
    """Collects the canonical bytes."""

    __slots__ = ("_mask", "_parts", "length")

    def __init__(self, mask: Mask | None) -> None:
        self._parts: list[bytes] = []
        self._mask = mask
        self.length = 0

    def raw(self, data: bytes) -> None:
        self._parts.append(data)
        self.length += len(data)

    def text(self, text: str, *, cut: bool = False) -> None:
        """A piece of text; a cut one ends the stream."""
        if self._mask is not None:
            text = self._mask(text)
            if cut:
                text = text[:-UNMASKED_TAIL_CHARS]
        try:
            self.raw(text.encode())
        except UnicodeEncodeError:
            self.raw(text.encode("utf-8", "surrogatepass"))
        if cut:
            raise _Cut

    def value(self, value: Any, *, cut: bool = False) -> None:
        """Any JSON value, as text."""
        if cut:
            raise _Cut
        self.text(_spelled(value))

    def media(self, part: dict[str, Any], *, cut: bool = False) -> None:
        """An image, a sound or a file, as a digest."""
        if cut:
            raise _Cut
        self.raw(MEDIA + blake3(_spelled(part).encode("utf-8", "surrogatepass")).digest(length=16))

    def joined(self) -> bytes:
        return b"".join(self._parts)


def _spelled(value: Any) -> str:
    """A JSON value spelled in one way: engines spell what they have parsed anew, and a client whose order of keys
    wavers still holds one conversation. Anthropic's cache marks are no part of it: they move on with each turn.
    """
    if isinstance(value, dict) and "cache_control" in value:
        value = {name: field for name, field in value.items() if name != "cache_control"}
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, sort_keys=True)


def render(api: Api, body: dict[str, Any], *, cut: bool, mask: Mask | None, schemas: bool) -> Prompt | None:
    """The canonical prompt of a request body, None where it holds none.

    cut: the body is only a head, parsed as far as it goes; then the last key of each open mapping is unfinished.
    mask: applied to every text, to hide volatile spans. schemas: whether the template renders output schemas.
    """
    stream = _Stream(mask)
    ends: dict[str, int] = {}
    has_turns = True
    try:
        match api:
            case Api.CHAT | Api.MESSAGES:
                _preamble(stream, body, cut, schemas)
                # `system` is Anthropic's place for what others put into the first message.
                _dialogue(stream, body, ends, cut, "system", "messages")
            case Api.RESPONSES:
                _preamble(stream, body, cut, schemas)
                _dialogue(stream, body, ends, cut, "instructions", "input")
            case Api.EMBEDDINGS if isinstance(body.get("messages"), list):
                _dialogue(stream, body, ends, cut, "system", "messages")
            case Api.COMPLETIONS | Api.EMBEDDINGS:
                has_turns = False
                name = "prompt" if api is Api.COMPLETIONS else "input"
                _plain(stream, body.get(name), cut and _open(body, name))
            case _:
                return None
    except _Cut:
        pass
    data = stream.joined()
    return Prompt(data, ends.get("system"), ends.get("opening"), has_turns) if data else None


def _open(mapping: dict[str, Any], name: str) -> bool:
    """In a cut document: whether this is the value that was being read when it ended."""
    return next(reversed(mapping), None) == name


def _preamble(stream: _Stream, body: dict[str, Any], cut: bool, schemas: bool) -> None:
    """What templates render ahead of all messages."""
    for name in TEMPLATE_EXTRAS + (SCHEMAS if schemas else ()):
        if body.get(name) is not None:
            stream.raw(ITEM + name.encode() + CONTENT)
            stream.value(body[name], cut=cut and _open(body, name))
    for name in ("tools", "functions"):
        tools = body.get(name)
        if not isinstance(tools, list):
            continue
        is_open = cut and _open(body, name)
        for index, tool in enumerate(tools):
            stream.raw(ITEM + b"tool" + CONTENT)
            stream.value(tool, cut=is_open and index == len(tools) - 1)
        if is_open:
            raise _Cut


def _dialogue(
    stream: _Stream, body: dict[str, Any], ends: dict[str, int], cut: bool, system_field: str, turns_field: str
) -> None:
    """All turns, the system's in front, wherever the document has them."""
    given = body.get(turns_field)
    turns = given if isinstance(given, list) else [] if given is None else [{"role": "user", "content": given}]
    more_may_come = cut and (turns_field not in body or _open(body, turns_field))
    if (system := body.get(system_field)) is not None:
        if isinstance(system, list):
            system = [block for block in system if not _is_billing(block, cut)]
        if cut and _open(body, system_field):
            turns, more_may_come = [], True
        turns = [{"role": "system", "content": system}, *turns]
    _turns(stream, turns, ends, more_may_come)


def _is_billing(block: Any, cut: bool) -> bool:
    text = block.get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and (text.startswith(BILLING_BLOCK) or (cut and BILLING_BLOCK.startswith(text)))


def _turns(stream: _Stream, turns: Sequence[Any], ends: dict[str, int], cut: bool) -> None:
    """cut: more turns may come, and the last one may be unfinished."""
    leading = True
    for index, turn in enumerate(turns):
        is_open = cut and index == len(turns) - 1
        role = turn.get("role") if isinstance(turn, dict) else None
        if is_open and isinstance(turn, dict) and (role is None or _open(turn, "role")):
            raise _Cut  # whose turn it is, is not known yet
        if leading and not (isinstance(role, str) and role in SYSTEM_ROLES):
            leading = False
            if stream.length:
                ends["system"] = stream.length
        _turn(stream, turn, role, is_open)
        if role == "user":
            ends.setdefault("opening", stream.length)
    if leading and stream.length and not cut:
        ends["system"] = stream.length


def _turn(stream: _Stream, turn: Any, role: Any, cut: bool) -> None:
    stream.raw(TURN)
    if not isinstance(turn, dict):
        stream.value(turn, cut=cut)
        return
    if role is not None:
        stream.text(str(role))
    stream.raw(CONTENT)
    # The content first, wherever it stands, so that a head that reaches into it needs to know nothing else.
    if "content" in turn:
        _content(stream, turn["content"], cut and _open(turn, "content"))
    if cut:
        raise _Cut  # other fields, not yet seen, may come before those that were
    for name in sorted(turn):
        # Clients send back what they were sent, `"tool_calls": []` among it, which renders as nothing.
        if name not in UNRENDERED and turn[name] not in (None, [], {}, ""):
            stream.raw(ITEM + name.encode("utf-8", "surrogatepass") + CONTENT)
            stream.value(turn[name])


def _content(stream: _Stream, content: Any, cut: bool) -> None:
    if isinstance(content, str):
        stream.text(content, cut=cut)
        return
    if not isinstance(content, list):
        if content is not None:
            stream.value(content, cut=cut)
        return
    for index, part in enumerate(content):
        is_open = cut and index == len(content) - 1
        if index:
            stream.raw(b"\n")  # vLLM joins the texts of one message so
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            stream.text(part, cut=is_open)
        elif is_open and (kind is None or _open(part, "type")):
            raise _Cut
        elif not isinstance(kind, str):
            stream.value(part, cut=is_open)
        elif kind in TEXT_PARTS and isinstance(part.get("text"), str):
            stream.text(part["text"], cut=is_open)
        elif kind in MEDIA_PARTS:
            stream.media(part, cut=is_open)
        else:
            stream.value(part, cut=is_open)


def _plain(stream: _Stream, prompt: Any, cut: bool) -> None:
    """A prompt without turns: text, token ids, or a list of either."""
    if isinstance(prompt, str):
        stream.text(prompt, cut=cut)
    elif isinstance(prompt, list):
        if prompt and all(type(token) is int for token in prompt):
            _tokens(stream, prompt, cut)
            return
        for index, item in enumerate(prompt):
            is_open = cut and index == len(prompt) - 1
            if index:
                stream.raw(TURN)
            if isinstance(item, str):
                stream.text(item, cut=is_open)
            elif isinstance(item, list) and all(type(token) is int for token in item):
                _tokens(stream, item, is_open)
            else:
                stream.value(item, cut=is_open)
    elif prompt is not None:
        stream.value(prompt, cut=cut)


def _tokens(stream: _Stream, tokens: list[int], cut: bool) -> None:
    if cut:
        tokens = tokens[:-1]  # its last digits may be missing
    try:
        stream.raw(struct.pack(f"<{len(tokens)}I", *tokens))
    except struct.error:  # no engine's vocabulary
        stream.raw(struct.pack(f"<{len(tokens)}I", *(token & 0xFFFFFFFF for token in tokens)))
    if cut:
        raise _Cut
