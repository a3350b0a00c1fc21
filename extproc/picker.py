"""The endpoint picker: the pure core joined to a clock and to whoever watches decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from extproc.core.decision import Decision
from extproc.core.features import FeatureSettings, extract
from extproc.core.known import KnownSessions, key_by_headers
from extproc.core.router import Router

if TYPE_CHECKING:
    from extproc.core.features import Features
    from extproc.core.request import Request


@dataclass(slots=True)
class ResponseStart:
    """What the beginning of an answer says.

    first_token: the engine has finished the prefill (see `extproc.exchange`).
    prompt_tokens, cached_tokens: the engine's own counts, None where it does not say.
    queue_depth: requests at the replica that wait for their first token, None where it does not say.
    served_endpoint: "ip:port" that really answered, None where the data plane does not say.
    event_stream: the answer comes token by token; any other begins when its last token is there.
    """

    status: int
    first_token: bool
    prompt_tokens: int | None
    cached_tokens: int | None
    queue_depth: int | None
    served_endpoint: str | None
    event_stream: bool = True


class Picker(Protocol):
    """Whoever routes a request: this process, or one that it asks (extproc.workers)."""

    def pick(self, request: Request, allowed_endpoints: frozenset[str] | None) -> RoutedRequest:
        """Route one request. `allowed_endpoints`: the data plane's preselection ("ip:port"), None: any."""

    def pick_by_headers(self, request: Request, allowed_endpoints: frozenset[str] | None) -> RoutedRequest | None:
        """Route one whose body has not been seen, where its headers say enough. None: pick it by its body."""


class RoutedRequest(Protocol):
    """A request from its decision to its stream's end."""

    @property
    def decision(self) -> Decision:
        """Where it goes, or why nowhere."""

    def response_started(self, start: ResponseStart) -> None:
        """The answer's headers came."""

    def finish(self) -> None:
        """The stream ended. Idempotent."""


class DecisionObserver(Protocol):
    """Watches decisions for spans, metrics and passive health. Called on the event loop: must not block.

    `finished` follows every `decided` exactly once, whichever way the stream ends.
    """

    def decided(self, request: Request, features: Features, decision: Decision, took_s: float) -> None:
        """A request was routed or refused; `took_s`: features and decision together."""

    def response_started(self, decision: Decision, start: ResponseStart, since_decision_s: float) -> None:
        """The answer's headers came; never called where the data plane does not send them."""

    def finished(self, decision: Decision, since_decision_s: float) -> None:
        """The stream ended."""


class NoObserver:
    """Nobody watches."""

    def decided(self, request: Request, features: Features, decision: Decision, took_s: float) -> None:
        pass

    def response_started(self, decision: Decision, start: ResponseStart, since_decision_s: float) -> None:
        pass

    def finished(self, decision: Decision, since_decision_s: float) -> None:
        pass


@dataclass(slots=True)
class EndpointPicker:
    """What all streams share. `feature_settings` may be replaced between two requests (live reload).

    max_unread_bytes: longer bodies are asked for: the data plane refuses those that it can't hold. 0: all are.
    clock: monotonic seconds.
    """

    router: Router
    feature_settings: FeatureSettings = field(default_factory=FeatureSettings)
    observer: DecisionObserver = field(default_factory=NoObserver)
    max_unread_bytes: int = 0
    known: KnownSessions = field(default_factory=KnownSessions)
    clock: Callable[[], float] = monotonic

    def pick(self, request: Request, allowed_endpoints: frozenset[str] | None) -> Pick:
        """Route one request; the pick holds its lease until `Pick.finish`."""
        began_s = self.clock()
        features = extract(request, self.feature_settings)
        return self.route(request, features, len(request.body), allowed_endpoints, self.clock() - began_s)

    def pick_by_headers(self, request: Request, allowed_endpoints: frozenset[str] | None) -> Pick | None:
        """Route one whose body has not been seen, if it is a long one of a known session."""
        began_s = self.clock()
        key = known_key(request, self.feature_settings, self.max_unread_bytes)
        if key is None:
            return None
        return self.route_known(request, key, allowed_endpoints, self.clock() - began_s)

    def route(
        self,
        request: Request,
        features: Features,
        body_bytes: int,
        allowed_endpoints: frozenset[str] | None,
        reading_s: float,
    ) -> Pick:
        """The same for a request that has been read: so much of its body, in so much time."""
        settings = self.feature_settings
        if 0 < settings.unread_from_bytes <= body_bytes <= self.max_unread_bytes:
            self.known.note(features, body_bytes, settings)
        return self._route(request, features, allowed_endpoints, reading_s)

    def route_known(
        self, request: Request, key: bytes, allowed_endpoints: frozenset[str] | None, reading_s: float
    ) -> Pick | None:
        """The same by a key that the headers tell, which took `reading_s`."""
        if self.router.needs_model(request.path):
            return None
        body_bytes = request.content_length_bytes or 0
        features = self.known.recall(key, request.path, body_bytes, self.feature_settings)
        return self._route(request, features, allowed_endpoints, reading_s) if features is not None else None

    def _route(
        self, request: Request, features: Features, allowed_endpoints: frozenset[str] | None, reading_s: float
    ) -> Pick:
        began_s = self.clock()
        decision = self.router.decide(features, began_s, allowed_endpoints)
        decided_s = self.clock()
        self.observer.decided(request, features, decision, reading_s + decided_s - began_s)
        return Pick(self, decision, decided_s, features if features.by_headers else None)


def known_key(request: Request, settings: FeatureSettings, max_unread_bytes: int) -> bytes | None:
    """Of a request whose body is long enough to be left unread, the key that its headers tell."""
    if not 0 < settings.unread_from_bytes <= (request.content_length_bytes or 0) <= max_unread_bytes:
        return None
    return key_by_headers(request, settings)


@dataclass(slots=True)
class Pick:
    """A decision on its way: from the request's end to the stream's. recalled: what it was taken by, if not read."""

    picker: EndpointPicker
    decision: Decision
    decided_s: float
    recalled: Features | None = None
    finished: bool = False

    def response_started(self, start: ResponseStart) -> None:
        now_s = self.picker.clock()
        if self.recalled is not None and self.decision.lease is not None and not start.event_stream:
            self.decision.lease.streamed = False  # unlike the turn that was read
        if start.first_token and self.decision.lease is not None:
            self.picker.router.first_token(self.decision.lease, now_s, start.prompt_tokens, start.cached_tokens)
        if self.recalled is not None and start.cached_tokens is not None and start.prompt_tokens is not None:
            expected_tokens = start.prompt_tokens * self.decision.matched_bytes / max(1, self.recalled.prompt_bytes)
            if start.cached_tokens < expected_tokens / 2:
                self.picker.known.doubt(self.recalled)
        self.picker.observer.response_started(self.decision, start, now_s - self.decided_s)

    def finish(self) -> None:
        """Release the lease. Idempotent."""
        if self.finished:
            return
        self.finished = True
        now_s = self.picker.clock()
        if self.decision.lease is not None:
            self.picker.router.finish(self.decision.lease, now_s)
        self.picker.observer.finished(self.decision, now_s - self.decided_s)
