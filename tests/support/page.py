"""Asking for a page."""

from __future__ import annotations

import urllib.request


def get(url: str) -> str:
    """Raises URLError where there is none, HTTPError for any other status than 200."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
        return text
