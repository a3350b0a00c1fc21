"""Kinds of requests that routers are reported to get wrong, and what must hold between them, through `explain`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from extproc.core.features import FeatureSettings
from extproc.explain import explain

FILE = json.loads((Path(__file__).parents[1] / "data" / "request_cases.json").read_text(encoding="utf-8"))
TEXTS = {name: text * times for name, (text, times) in FILE["texts"].items()}
CASES = {case["id"]: case for case in FILE["cases"]}
RELATIONS = {"same_conversation", "different_conversation", "shared_prefix", "no_shared_prefix", "source_none"}


def written_out(value: Any) -> Any:
    match value:
        case str():
            for name, text in TEXTS.items():
                value = value.replace(name, text)
            return value
        case list():
            return [written_out(each) for each in value]
        case dict():
            return {name: written_out(each) for name, each in value.items()}
    return value


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    case = CASES[name]
    assert case.keys() <= RELATIONS | {"id", "requests"}
    found = [explain(written_out(request), FeatureSettings()) for request in case["requests"]]
    keys = [each["conversation_key"] for each in found]
    first = [each["rungs"][0]["signature"] if each["rungs"] else None for each in found]
    for group in case.get("same_conversation", ()):
        assert keys[group[0]] is not None
        assert len({keys[index] for index in group}) == 1, group
    for one, two in case.get("different_conversation", ()):
        assert keys[one] != keys[two], (one, two)
    for group in case.get("shared_prefix", ()):
        assert first[group[0]] is not None
        assert len({first[index] for index in group}) == 1, group
    for one, two in case.get("no_shared_prefix", ()):
        assert first[one] != first[two], (one, two)
    for index in case.get("source_none", ()):
        assert (found[index]["conversation_source"], keys[index]) == (None, None), index
