"""Members in a file of their own (TOML or JSON), read again when it changes.

[[replicas]]
endpoint = "10.0.0.7:8000"
weight = 2.0
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from extproc.feeds.feed import FeedError
from extproc.feeds.static import StaticReplica

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.core.replica import Replica

_ENTRIES = TypeAdapter(tuple[StaticReplica, ...])


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
                self._replicas = tuple(entry.replica() for entry in _ENTRIES.validate_python(self._parse(content)))
                self._seen = content
        except (OSError, ValueError, ValidationError) as error:
            raise FeedError(f"{self._path}: {error}") from error
        return self._replicas

    def _parse(self, content: bytes) -> Any:
        text = content.decode()
        document = json.loads(text) if self._path.suffix == ".json" else tomllib.loads(text)
        return document["replicas"] if isinstance(document, dict) and "replicas" in document else document

    async def close(self) -> None:
        pass
