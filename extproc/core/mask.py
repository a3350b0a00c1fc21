"""Mask: volatile spans that would make every prompt a new one, such as today's date in a system prompt.

Masking changes the key and never the body. It makes prompts that differ only in such a span look alike to the
router; the engine still sees them differ, and its cache hits only up to the first changed token. So it is worth
having where the span stands late or changes slowly, and it is off by default.
"""

from __future__ import annotations

import re

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_WEEKDAY = r"(?:(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?,?\s+)?"
_NO_DIGIT_BEFORE, _NO_DIGIT_AFTER = r"(?<!\d)", r"(?!\d)"

SPANS = {
    "date": (
        rf"{_NO_DIGIT_BEFORE}\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}{_NO_DIGIT_AFTER}"
        rf"|{_NO_DIGIT_BEFORE}\d{{1,2}}[-/.]\d{{1,2}}[-/.]\d{{4}}{_NO_DIGIT_AFTER}"
        rf"|\b{_WEEKDAY}{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?,?\s+\d{{4}}\b"
        rf"|\b{_WEEKDAY}\d{{1,2}}(?:st|nd|rd|th)?\s+{_MONTH},?\s+\d{{4}}\b"
        rf"|{_NO_DIGIT_BEFORE}\d{{4}}\s?年\s?\d{{1,2}}\s?月\s?\d{{1,2}}\s?日"
    ),
    "time": (
        r"(?<![\d:])\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?(?![\d:])"
        r"(?:\s?[AaPp]\.?[Mm]\b\.?)?(?:\s?(?:Z|UTC|GMT)\b|[+-]\d{2}:?\d{2}(?!\d))?"
    ),
    "uuid": r"(?<![0-9A-Fa-f-])[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}(?![0-9A-Fa-f-])",
}

# What a masked span becomes. A control character, so that it is no ordinary text.
_BLANK = "\x16"

# The longest span that a pattern may match, its look-around included, for heads and whole prompts to agree.
LONGEST_SPAN_CHARS = 128


class Mask:
    """Blanks the spans that any of the given patterns matches, in one pass over the text."""

    __slots__ = ("_pattern",)

    def __init__(self, names: tuple[str, ...], patterns: tuple[str, ...] = ()) -> None:
        """Take names out of SPANS, and regular expressions. Raises ValueError that names what is wrong."""
        unknown = [name for name in names if name not in SPANS]
        if unknown:
            raise ValueError(f"unknown mask {', '.join(map(repr, unknown))}; known: {', '.join(SPANS)}")
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"mask pattern {pattern!r}: {error}") from error
        alternatives = [SPANS[name] for name in names] + list(patterns)
        self._pattern = re.compile("|".join(f"(?:{one})" for one in alternatives)) if alternatives else None

    def __call__(self, text: str, open_: bool = False) -> str:
        """Blank the spans of a text. Of an open one only the part that no later character can change is kept."""
        if self._pattern is None:
            return text
        if not open_:
            return self._pattern.sub(_BLANK, text)
        kept_to = max(0, len(text) - LONGEST_SPAN_CHARS)
        pieces: list[str] = []
        at = 0
        for span in self._pattern.finditer(text):
            if span.end() > kept_to:
                kept_to = min(kept_to, span.start())
                break
            pieces += (text[at : span.start()], _BLANK)
            at = span.end()
        pieces.append(text[at:kept_to])
        return "".join(pieces)
