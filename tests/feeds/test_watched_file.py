"""Members in a file that changes while it is watched."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from extproc.core.replica import Replica
from extproc.feeds.feed import FeedError
from extproc.feeds.watched_file import FileFeed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TOML = """
[[replicas]]
endpoint = "10.0.0.1:8000"

[[replicas]]
endpoint = "10.0.0.2:8000"
id = "second"
weight = 2
models = ["m"]
"""
BOTH = (Replica("10.0.0.1:8000", "10.0.0.1:8000"), Replica("second", "10.0.0.2:8000", frozenset({"m"}), 2.0))


def read(path: Path, content: str | bytes | None = None) -> Sequence[Replica]:
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return asyncio.run(FileFeed(str(path)).read())


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    document = {
        "replicas": [
            {"endpoint": "10.0.0.1:8000"},
            {"endpoint": "10.0.0.2:8000", "id": "second", "weight": 2, "models": ["m"]},
        ]
    }
    assert read(tmp_path / "fleet.toml", TOML) == read(tmp_path / "fleet.json", json.dumps(document)) == BOTH


def test_a_change_is_seen_at_the_next_look(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(TOML)

    async def looks() -> None:
        feed = FileFeed(str(path))
        assert await feed.read() == await feed.read() == BOTH
        path.write_text(TOML.replace("10.0.0.1", "10.0.0.9"))
        assert [replica.endpoint for replica in await feed.read()] == ["10.0.0.9:8000", "10.0.0.2:8000"]
        other = tmp_path / "other.toml"
        other.write_text(TOML)
        other.replace(path)
        assert await feed.read() == BOTH
        path.write_text("replicas = []")
        assert await feed.read() == ()

    asyncio.run(looks())


def test_a_half_written_file_is_a_failed_look_each_time_until_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(TOML)

    async def looks() -> None:
        feed = FileFeed(str(path))
        await feed.read()
        for half in ("", TOML[: TOML.index("10.0.0.2")], TOML[: TOML.rindex('"]')]):
            path.write_text(half)
            for _ in range(2):
                with pytest.raises(FeedError, match=r"fleet\.toml"):
                    await feed.read()
        path.unlink()
        with pytest.raises(FeedError, match="No such file"):
            await feed.read()
        path.write_text(TOML)
        assert await feed.read() == BOTH

    asyncio.run(looks())


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("fleet.toml", "[fleet]", "fleet"),
        ("fleet.toml", "replicas = 3", "tuple"),
        ("fleet.toml", '[[replicas]]\nendpoint = "a"', "host:port"),
        ("fleet.toml", '[[replicas]]\nendpoint = "a:1"\nwieght = 2', "wieght"),
        ("fleet.toml", '[[replicas]]\nendpoint = "a:1"\nweight = -1', "weight must be above 0"),
        ("fleet.toml", '[[replicas]]\nendpoint = "a:1"\nweight = nan', "weight must be above 0"),
        ("fleet.toml", '[[replicas]]\nid = "a"', "endpoint"),
        ("fleet.toml", '[[replicas]]\nendpoint = "a:1"\n[[replicas]]\nendpoint = "a:1"', "the same id"),
        ("fleet.json", "[]", "Document"),
        ("fleet.json", "null", "Document"),
        ("fleet.json", '{"replicas": [', "fleet.json"),
        ("fleet.json", TOML, "fleet.json"),
        ("fleet.json", b'{"replicas": "\xff"}', "utf-8"),
    ],
)
def test_a_wrong_file_is_a_failed_look_that_says_why(
    tmp_path: Path, name: str, content: str | bytes, error: str
) -> None:
    with pytest.raises(FeedError, match=error):
        read(tmp_path / name, content)


def test_a_folder_is_a_failed_look(tmp_path: Path) -> None:
    with pytest.raises(FeedError, match="directory"):
        read(tmp_path)
