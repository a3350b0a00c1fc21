"""The canonical stream: what is equal, what differs, what a boundary is, and what a cut leaves."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from extproc.core.api import Api
from extproc.core.document import Document, read_document
from extproc.core.features import FeatureSettings, extract
from extproc.core.mask import SPANS, Mask
from extproc.core.prompt import Prompt, canonical_prompt
from tests.support.bodies import BODIES, CHAT, MANUAL, MESSAGES, PICTURE, TOOLS, head_of, post

USER = {"role": "user", "content": "Which hub?"}
SYSTEM = {"role": "system", "content": "You mend bicycles."}


DEFAULT = FeatureSettings().template_fields
UNMASKED = Mask(())
WITH_SCHEMA = (*DEFAULT, "response_format")


def read(api: str, body: bytes, *, truncated: bool = False, fields: tuple[str, ...] = DEFAULT) -> Prompt | None:
    document = read_document(body, truncated)
    return canonical_prompt(Api(api), document, fields, UNMASKED) if document is not None else None


def prompt_of(api: str, fields: tuple[str, ...] = DEFAULT, /, **body: Any) -> Prompt:
    prompt = read(api, json.dumps(body).encode(), fields=fields)
    assert prompt is not None
    return prompt


def chat(*turns: Any, **fields: Any) -> Prompt:
    return prompt_of("chat", messages=list(turns), **fields)


def test_the_stream_is_in_the_order_of_a_chat_template() -> None:
    prompt = prompt_of(
        "chat", WITH_SCHEMA, messages=[SYSTEM, USER], tools=TOOLS, documents=["d"], response_format={"a": 1}
    )
    places = [
        prompt.stream.index(part) for part in (b'["d"]', b'{"a":1}', b"find_frame", b"order_spokes", b"mend", b"hub")
    ]
    assert places == sorted(places)


def test_boundaries() -> None:
    prompt = chat(
        SYSTEM, {"role": "developer", "content": "Metric."}, USER, {"role": "assistant", "content": "A 36-hole."}
    )
    assert prompt.system_end == len(chat(SYSTEM, {"role": "developer", "content": "Metric."}).stream)
    assert prompt.opening_end == len(chat(SYSTEM, {"role": "developer", "content": "Metric."}, USER).stream)
    assert chat(USER).system_end is None, "nothing stands ahead of the turns"
    assert chat(USER, tools=TOOLS).system_end is not None
    assert chat(SYSTEM).opening_end is None
    greeting = {"role": "assistant", "content": "What can I do for you?"}
    assert chat(greeting, USER).opening_end == len(chat(greeting, USER).stream), "a greeting opens no conversation"
    late = chat(SYSTEM, USER, SYSTEM, USER)
    assert late.system_end == len(chat(SYSTEM).stream), "a system message amid the turns is one of them"


def test_a_dialogue_that_grows_only_appends() -> None:
    turns = CHAT["messages"]
    streams = [chat(*turns[:count], tools=TOOLS).stream for count in range(1, len(turns) + 1)]
    for shorter, longer in itertools.pairwise(streams):
        assert longer.startswith(shorter)
        assert len(longer) > len(shorter)


SAME: dict[str, tuple[Prompt, Prompt]] = {
    "developer, as OpenAI now calls the system": (chat(SYSTEM, USER), chat({**SYSTEM, "role": "developer"}, USER)),
    "text or one text part": (chat(USER), chat({"role": "user", "content": [{"type": "text", "text": "Which hub?"}]})),
    "one text or two": (
        chat({"role": "user", "content": "a\nb"}),
        chat({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
    ),
    "order of keys": (
        chat(USER, tools=[{"a": 1, "b": {"c": 2, "d": 3}}]),
        chat(USER, tools=[{"b": {"d": 3, "c": 2}, "a": 1}]),
    ),
    "order of a turn's keys": (chat({"role": "user", "content": "x"}), chat({"content": "x", "role": "user"})),
    "sampling": (chat(USER), chat(USER, temperature=0.7, stream=True, seed=1, n=2, logprobs=True, user="ada")),
    "null and empty fields": (
        chat({"role": "assistant", "content": "x"}),
        chat({"role": "assistant", "content": "x", "tool_calls": [], "refusal": None, "annotations": []}),
    ),
    "system as field or message": (
        prompt_of("messages", system="s", messages=[USER]),
        chat({"role": "system", "content": "s"}, USER),
    ),
    "system as text or block": (
        prompt_of("messages", system="s", messages=[USER]),
        prompt_of("messages", system=[{"type": "text", "text": "s"}], messages=[USER]),
    ),
    "cache marks": (
        prompt_of(
            "messages",
            tools=[{"name": "t"}],
            messages=[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]}],
        ),
        prompt_of(
            "messages",
            tools=[{"name": "t", "cache_control": {"type": "ephemeral"}}],
            messages=[
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "1",
                            "content": "x",
                            "cache_control": {"type": "ephemeral"},
                        }
                    ],
                }
            ],
        ),
    ),
    "Claude Code's billing block": (
        prompt_of("messages", system=[{"type": "text", "text": "s"}], messages=[USER]),
        prompt_of(
            "messages",
            system=[{"type": "text", "text": "x-anthropic-billing-header: cch=1a2b;"}, {"type": "text", "text": "s"}],
            messages=[USER],
        ),
    ),
    "instructions and input": (
        prompt_of("responses", instructions="s", input="Which hub?"),
        chat({"role": "system", "content": "s"}, USER),
    ),
    "input as text or item": (
        prompt_of("responses", input="Which hub?"),
        prompt_of(
            "responses",
            input=[{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Which hub?"}]}],
        ),
    ),
    "schemas that no template renders": (chat(USER), chat(USER, response_format={"type": "json_object"})),
}


@pytest.mark.parametrize("what", SAME)
def test_what_is_the_same_prompt(what: str) -> None:
    one, two = SAME[what]
    assert one == two


OTHER: dict[str, tuple[Prompt, Prompt]] = {
    "text": (chat(USER), chat({"role": "user", "content": "Which rim?"})),
    "role": (chat(USER), chat({"role": "assistant", "content": "Which hub?"})),
    "name": (chat(USER), chat({**USER, "name": "ada"})),
    "where a turn ends": (
        chat(USER, {"role": "user", "content": "x"}),
        chat({"role": "user", "content": "Which hub?x"}),
    ),
    "order of tools": (chat(USER, tools=TOOLS), chat(USER, tools=TOOLS[::-1])),
    "tool calls": (
        chat(USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}),
        chat(USER, {"role": "assistant", "tool_calls": [{"id": "2"}]}),
    ),
    "tool result": (
        chat(USER, {"role": "tool", "tool_call_id": "1", "content": "x"}),
        chat(USER, {"role": "tool", "tool_call_id": "2", "content": "x"}),
    ),
    "reasoning": (
        chat(USER, {"role": "assistant", "content": "x"}),
        chat(USER, {"role": "assistant", "content": "x", "reasoning_content": "y"}),
    ),
    "picture": (
        chat({"role": "user", "content": [PICTURE]}),
        chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}),
    ),
    "sound": (
        chat({"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]}),
        chat({"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AAAB", "format": "wav"}}]}),
    ),
    "template input": (chat(USER), chat(USER, chat_template_kwargs={"enable_thinking": False})),
    "a token or its text": (prompt_of("completions", prompt=[49]), prompt_of("completions", prompt="1")),
    "token ids, one by one or as a list of one": (
        prompt_of("completions", prompt=[1, 2, 3]),
        prompt_of("completions", prompt=[1, 23]),
    ),
    "texts, joined or apart": (prompt_of("completions", prompt=["a", "b"]), prompt_of("completions", prompt=["ab"])),
}


@pytest.mark.parametrize("what", OTHER)
def test_what_is_another_prompt(what: str) -> None:
    one, two = OTHER[what]
    assert one.stream != two.stream


def test_schemas_count_where_the_template_renders_them() -> None:
    plain, with_schema = (
        prompt_of("chat", WITH_SCHEMA, messages=[SYSTEM, USER], **fields)
        for fields in ({}, {"response_format": {"type": "json_object"}})
    )
    assert plain.stream != with_schema.stream


def test_a_picture_weighs_little_whatever_its_size() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}
    assert len(chat({"role": "user", "content": [picture]}).stream) < 100


def test_token_ids_are_four_bytes_each_and_none_is_refused() -> None:
    assert len(prompt_of("completions", prompt=list(range(1000))).stream) == 4000
    for odd in (-1, 2**32, 10**30, 1.5, True, None):
        assert prompt_of("completions", prompt=[7, odd]).stream != prompt_of("completions", prompt=[7, 8]).stream


@pytest.mark.parametrize("body", [{}, {"messages": []}, {"messages": None}, {"prompt": "x"}])
def test_a_chat_without_messages_has_no_prompt(body: dict[str, Any]) -> None:
    assert canonical_prompt(Api.CHAT, Document(body), DEFAULT, UNMASKED) is None


@pytest.mark.parametrize("escaped", [False, True], ids=["utf-8", "escapes"])
@pytest.mark.parametrize("name", BODIES)
def test_every_head_shows_the_beginning_of_the_whole(name: str, escaped: bool) -> None:
    """Cut at every byte: inside keys, escapes, surrogate pairs, characters and numbers."""
    dialect, document = BODIES[name]
    body = post(dialect, document, escaped=escaped).body
    whole = read(dialect, body)
    assert whole is not None
    reached = 0
    for end in range(1, len(body) + 1):
        cut = read(dialect, body[:end], truncated=True)
        if cut is None or (name.endswith("last") and not _reaches_what_comes_first(document, body[:end])):
            continue  # a head can't know what stands behind it
        assert whole.stream.startswith(cut.stream), f"cut at {end}"
        assert cut.system_end in (None, whole.system_end), f"cut at {end}"
        assert cut.opening_end in (None, whole.opening_end), f"cut at {end}"
        reached = max(reached, len(cut.stream))
    assert reached > 0.5 * len(whole.stream)


def _reaches_what_comes_first(document: dict[str, Any], head: bytes) -> bool:
    seen = read_document(head, truncated=True)
    return seen is not None and {"system", "tools"} & document.keys() <= seen.fields.keys()


def test_a_mark_that_is_cut_off_is_no_boundary() -> None:
    """`"role":"dev` may become one more leading system message, and tools are not all there is before the turns."""
    body = post("chat", {"tools": TOOLS, "messages": [SYSTEM, {"role": "developer", "content": "Metric."}, USER]}).body
    for mark in (b'"messages"', b"developer", b"eloper", b'"role": "user"', b"ser"):
        cut = read("chat", body[: body.rindex(mark)], truncated=True)
        assert cut is not None
        assert cut.system_end is None


def test_masked_spans_are_no_part_of_the_prompt() -> None:
    settings = FeatureSettings(mask=("date", "time", "uuid"), mask_patterns=(r"build-\d+",))

    def ask(system: str) -> Any:
        return extract(post("chat", {"messages": [{"role": "system", "content": system}, USER]}), settings)

    monday = ask("Today is 2026-11-02, 09:30:00 AM, request 01234567-89ab-cdef-0123-456789abcdef of build-7. " + MANUAL)
    friday = ask("Today is 2026-11-06, 17:05:59 PM, request 76543210-89ab-cdef-0123-456789abcdef of build-9. " + MANUAL)
    assert monday == friday
    assert ask(MANUAL + "2026-11-02") != ask(MANUAL + "tomorrow")


@pytest.mark.parametrize("span", SPANS)
def test_a_span_that_the_head_cuts_in_two_leaves_the_key_alone(span: str) -> None:
    example = {"date": "2026-11-02", "time": "09:30:00.123456789 AM", "uuid": "01234567-89ab-cdef-0123-456789abcdef"}[
        span
    ]
    request = post(
        "chat", {"model": "m1", "messages": [{"role": "system", "content": f"{MANUAL} {example} " * 6}, USER]}
    )
    settings = FeatureSettings(mask=(span,))
    whole = {rung.offset_bytes: rung.signature for rung in extract(request, settings).rungs}
    for end in range(len(request.body)):
        for rung in extract(head_of(request, end), settings).rungs:
            assert whole[rung.offset_bytes] == rung.signature, f"cut at {end}"


def test_messages_whose_system_comes_last() -> None:
    """The order in which Anthropic's SDK sends them. Whole, it is the same prompt."""
    names = ("model", "messages", "max_tokens", "tools", "system")
    assert extract(post("messages", {name: MESSAGES[name] for name in names}), FeatureSettings()) == extract(
        post("messages", MESSAGES), FeatureSettings()
    )
