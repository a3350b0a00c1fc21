from __future__ import annotations

from typing import Any

import pytest

from serve_app.engine.prompt import PromptError, chat_tokens, completion_tokens, token_count, words


def chat(*messages: tuple[str, Any], **rest: Any) -> bytes:
    return chat_tokens({"messages": [{"role": role, "content": text} for role, text in messages], **rest})


def test_a_token_is_four_bytes() -> None:
    assert token_count(completion_tokens({"prompt": "x" * 16})[0]) == 4
    assert token_count(completion_tokens({"prompt": "x" * 17})[0]) == 5
    # marker "\2user" 2 tokens, text 4, end 1, marker "\2assistant" 3
    assert token_count(chat(("user", "x" * 16))) == 2 + 4 + 1 + 3


def test_the_next_turn_begins_with_the_prompt_and_its_answer() -> None:
    first = chat(("system", "be brief"), ("user", "hello there"))
    answer = "".join(words(first, 5))
    second = chat(("system", "be brief"), ("user", "hello there"), ("assistant", answer), ("user", "and?"))
    assert second.startswith(first + answer.encode())


def test_text_and_text_parts_are_the_same_prompt() -> None:
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}]
    assert chat(("user", parts)) == chat(("user", "hello there"))


def test_tools_come_before_the_messages() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    with_tools = chat(("system", "s"), tools=tools)
    assert with_tools.index(b'"name":"f"') < with_tools.index(b"system")
    assert chat(("system", "s"), tools=[]) == chat(("system", "s"))


def test_images_differ_by_content_and_cost_little() -> None:
    def image(data: str) -> bytes:
        return chat(("user", [{"type": "image_url", "image_url": {"url": data}}]))

    assert image("data:a" * 10_000) != image("data:b" * 10_000)
    assert token_count(image("data:a" * 10_000)) < 20


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [("abcd", [1]), (["abcd", "abcde"], [1, 2]), ([1, 2, 3], [3]), ([[1, 2], [3]], [2, 1]), ("", [0])],
)
def test_every_shape_of_a_completion_prompt(prompt: Any, tokens: list[int]) -> None:
    assert [token_count(each) for each in completion_tokens({"prompt": prompt})] == tokens


@pytest.mark.parametrize("prompt", [None, 7, [], [[]], [-1], [1 << 32], [True], ["a", 1], {"a": 1}])
def test_other_completion_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(PromptError):
        completion_tokens({"prompt": prompt})


@pytest.mark.parametrize(
    "messages",
    [None, [], "hi", ["hi"], [{"content": "x"}], [{"role": 1}], [{"role": "user", "content": 5}]],
)
def test_other_messages_are_refused(messages: Any) -> None:
    with pytest.raises(PromptError):
        chat_tokens({"messages": messages})


def test_each_word_is_one_token_and_the_prompt_decides_which() -> None:
    text = "".join(words(b"prompt", 10))
    assert len(text) == 40
    assert text == "".join(words(b"prompt", 10))
    assert text != "".join(words(b"another", 10))


def test_lone_surrogates_are_text() -> None:
    assert chat(("user", "\ud800")) != chat(("user", "\ud801"))
