"""Known sessions: what was last read of each conversation that a header names, so that not every turn need be read.

The next turn of a long conversation is the last one and a little more. Its session header says which one, and its
content length how much more: enough to place it, and the body can stay in the data plane. It is read again

    when its prompt has grown past another rung     so that no rung is ever missed
    when its body has become shorter                it was edited, or is another conversation
    when its engine found half of it at most        of what it was thought to hold
    after a turn for each KiB of it                 its beginning may have changed unseen

and always while what was read last did not continue what was read before.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from extproc.core.features import FeatureSettings, session_key
from extproc.core.ladder import next_offset
from extproc.core.session import canonical_headers, find_session, tenant_of

if TYPE_CHECKING:
    from extproc.core.features import Features
    from extproc.core.request import Request

BYTES_PER_UNREAD_TURN: Final = 1024
"""Reading costs Envoy and the router some 6 us of CPU per KiB (docs/performance.md), so looking again adds 6 us to a
turn whatever its length: a few hundredths of it."""


def key_by_headers(request: Request, settings: FeatureSettings) -> bytes | None:
    """The conversation's key where its headers alone tell it: 16 bytes, the same as `Features` has."""
    if request.method.upper() != "POST":
        return None
    headers = canonical_headers(request.headers)
    session = find_session(headers, {}, settings)
    return session_key(session, tenant_of(headers, settings), settings) if session is not None else None


class KnownSession:
    """One conversation.

    features: of the body that was last read. body_bytes: its length. unread: turns since then.
    steady: that body continued the one read before it, if there was one.
    rung_bytes: a prompt of this length has a rung more. last_bytes: length of the latest body, read or not.
    """

    __slots__ = ("body_bytes", "features", "last_bytes", "rung_bytes", "steady", "unread")

    def __init__(self, features: Features, body_bytes: int, steady: bool) -> None:
        self.features = features
        self.body_bytes = body_bytes
        self.steady = steady
        self.rung_bytes = next_offset(features.prompt_bytes)
        self.last_bytes = body_bytes
        self.unread = 0


class KnownSessions:
    """Conversation key -> KnownSession; the least recently used go first. All go when the settings change."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[bytes, KnownSession] = OrderedDict()
        self._settings = FeatureSettings()

    def __len__(self) -> int:
        return len(self._sessions)

    def note(self, features: Features, body_bytes: int, settings: FeatureSettings) -> None:
        """A whole body was read. One without rungs, or whose session stands in it, teaches nothing for later."""
        self._follow(settings)
        key, source = features.conversation_key, features.conversation_source
        if key is None or source is None or not source.startswith("header:"):
            return
        before = self._sessions.pop(key, None)
        if not features.rungs or features.truncated:
            return
        steady = before is None or before.features.rungs[-1] in features.rungs
        self._sessions[key] = KnownSession(features, body_bytes, steady)
        if len(self._sessions) > settings.known_sessions:
            self._sessions.popitem(last=False)

    def recall(self, key: bytes, path: str, body_bytes: int, settings: FeatureSettings) -> Features | None:
        """The features of a request by its headers alone, or None where its body has to be read.

        key: see `key_by_headers`. body_bytes: its content length. Counts as a turn, so ask once for each request.
        """
        self._follow(settings)
        known = self._sessions.get(key)
        if known is None or not known.steady or known.features.path != path:
            return None
        # What is text in the body and what is JSON around it keep their proportion, whatever is escaped.
        prompt_bytes = known.features.prompt_bytes * body_bytes // known.body_bytes
        due = known.unread * BYTES_PER_UNREAD_TURN >= known.body_bytes
        if body_bytes < known.last_bytes or prompt_bytes >= known.rung_bytes or due:
            return None
        known.unread += 1
        known.last_bytes = body_bytes
        self._sessions.move_to_end(key)
        return replace(known.features, prompt_bytes=prompt_bytes, truncated=True, by_headers=True)

    def doubt(self, features: Features) -> None:
        """What was recalled has turned out wrong: read the next turn, to see whether it still continues this one."""
        known = self._sessions.get(features.conversation_key or b"")
        if known is not None:
            known.steady = False

    def _follow(self, settings: FeatureSettings) -> None:
        if settings is not self._settings:
            self._settings = settings
            self._sessions.clear()
