"""Which build of the router this is."""

from __future__ import annotations

from typing import Final

from extproc.core import router

COMPILED: Final = not (router.__file__ or "").endswith(".py")
"""The modules that every request passes through are machine code (hatch_build.py); else they are interpreted."""
