"""Members in a file of their own (TOML or, by its name, JSON), read again when it changes.

[[replicas]]
endpoint = "10.0.0.7:8000"
weight = 2.0
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, TypeAdapter

from extproc.feeds.feed import FeedError
from extproc.feeds.static import StaticReplica, replicas_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.core.replica import Replica


@dataclass(frozen=True, slots=True)
class Document:
    """What the file holds. It must name `replicas`, even if none: an empty file is one that is being written."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    replicas: tuple[StaticReplica, ...]


_DOCUMENT = TypeAdapter(Document)


class FileFeed:
    """A file is small and local, so it is simply read each time; a half-written one is a failed look."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._seen: bytes | None = None
        self._replicas: tuple[Replica, ...] = ()

    async def read(self) -> Sequence[Replica]:
        try:
            content = self._path.read_bytes()
            if content != self._seen:
                self._replicas = replicas_of(_DOCUMENT.validate_python(self._parse(content)).replicas)
                self._seen = content
        except (OSError, ValueError) as error:  # pydantic's and the parsers' errors are ValueErrors
            raise FeedError(f"{self._path}: {error}") from error
        return self._replicas

    async def close(self) -> None:
        pass

    def _parse(self, content: bytes) -> Any:
        text = content.decode()
        return json.loads(text) if self._path.suffix == ".json" else tomllib.loads(text)
