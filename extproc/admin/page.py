"""The live page: one document that needs nothing but this port."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import Final


def _read(name: str) -> str:
    return files(__package__).joinpath("web", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


_STYLE, _SCRIPT = (f"\n{_read(name)}" for name in ("page.css", "page.js"))

HTML: Final = (
    _read("page.html")
    .replace("<style></style>", f"<style>{_STYLE}</style>")
    .replace("<script></script>", f"<script>{_SCRIPT}</script>")
)
POLICY: Final = (
    f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Only what came with the page runs, so that a name in the data can't."""
