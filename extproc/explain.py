"""`extproc explain`: why a request goes where it goes.

What is known of the request needs no router. With a configuration the fleet is read as well, from the same source and
from the engines' own metrics, and weighed as a router would that has just started: placement on the ring is the same
in every router, what a running one remembers of earlier requests is not in it. A running one is asked with --live.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from extproc import config as configuration
from extproc import log
from extproc.core.api import Api
from extproc.core.features import extract
from extproc.core.request import Request
from extproc.core.router import Router
from extproc.feeds.engine_metrics import EngineMetrics
from extproc.feeds.feed import FeedError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping

    from extproc.config import Config
    from extproc.core.features import Features, FeatureSettings
    from extproc.core.replica import EngineLoad

BODIES: Final = ("body", "body_text", "body_base64")
LIVE_TIMEOUT_S: Final = 10.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the command line."""
    text = "say what the router sees in a request: JSON on stdin, JSON on stdout"
    parser = commands.add_parser("explain", help=text, description=text)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--config", metavar="FILE", type=Path, help="its [features]; and weigh its fleet's replicas")
    source.add_argument("--live", metavar="URL", help="ask a running router: the URL of its admin port")
    parser.add_argument("--jsonl", action="store_true", help="one request on each line of input and output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Explain what stands on stdin. 0: what is wrong with a request or the configuration is said in `notes`.

    1: the running router that was to be asked has not answered.
    """
    log.configure()  # to stderr: stdout is for the explanations
    lines = (line for line in sys.stdin.buffer if line.strip()) if args.jsonl else (sys.stdin.buffer.read(),)
    if args.live is not None:
        return _ask(args.live, lines, None if args.jsonl else 2)
    notes: list[str] = []
    try:
        config = configuration.load(args.config)
    except configuration.ConfigError as error:
        notes += ["the configuration can't be used, these are the defaults", *error.errors]
        config = configuration.Config()
    router = asyncio.run(read_fleet(config, notes)) if args.config is not None and not notes else None
    for line in lines:
        try:
            document = json.loads(line)
        except (ValueError, RecursionError) as error:
            document, unread = None, [f"the input is no JSON: {error}"]
        else:
            unread = []
        explanation = explain(document, config.features, router)
        explanation["notes"] = notes + (unread or explanation["notes"])
        print(json.dumps(explanation, indent=None if args.jsonl else 2), flush=True)
    return 0


def _ask(url: str, lines: Iterable[bytes], indent: int | None) -> int:
    """Let a running router explain: POST /debug/explain."""
    for line in lines:
        try:
            question = urllib.request.Request(url.rstrip("/") + "/debug/explain", line, method="POST")
            with urllib.request.urlopen(question, timeout=LIVE_TIMEOUT_S) as answer:
                print(json.dumps(json.load(answer), indent=indent), flush=True)
        except urllib.error.HTTPError as error:
            print(f"extproc: {url}: {error.read().decode(errors='replace').strip()}", file=sys.stderr)
            return 1
        except (OSError, ValueError) as error:  # URLError is an OSError
            print(f"extproc: {url}: {error}", file=sys.stderr)
            return 1
    return 0


def explain(document: Any, settings: FeatureSettings, router: Router | None = None) -> dict[str, Any]:
    """What the router sees in a request, and where it would send it.

    document: {"path", "headers", "body" | "body_text" | "body_base64"}, and where it matters "method" and "truncated"
        (only the body's head is there). Anything else is explained as far as it goes. Never raises.
    router: its members are weighed; nothing in it changes.
    """
    notes: list[str] = []
    request = _request(document, notes)
    features = extract(request, settings)
    if features.conversation_key is None:
        notes.append(_why_no_affinity(request, features))
    explanation: dict[str, Any] = {
        "api": features.api.value,
        "model": features.model,
        "conversation_key": features.conversation_key.hex() if features.conversation_key is not None else None,
        "conversation_source": features.conversation_source,
        "rungs": [{"offset": rung.offset_bytes, "signature": rung.signature.hex()} for rung in features.rungs],
        "system_offset": features.system_rung.offset_bytes if features.system_rung is not None else None,
        "prompt_bytes": features.prompt_bytes,
        "truncated": features.truncated,
        "streamed": features.streamed,
    }
    if router is not None:
        explanation |= _weighed(features, router)
    return explanation | {"notes": notes}


async def read_fleet(config: Config, notes: list[str]) -> Router:
    """A router that has looked once at its fleet. What could not be read is said in `notes`."""
    router = Router(config.routing)
    feed = config.membership.feed()
    try:
        router.set_members(await feed.read(), monotonic())
    except FeedError as error:
        notes.append(f"the membership can't be read: {error}")
    finally:
        await feed.close()
    if config.load.enabled and router.loads:
        await _read_loads(config, router, notes)
    return router


async def _read_loads(config: Config, router: Router, notes: list[str]) -> None:
    silent = set(router.loads)
    all_told = asyncio.Event()

    def told(replica_id: str, engine: EngineLoad) -> None:
        router.set_load(replica_id, engine, monotonic())
        silent.discard(replica_id)
        if not silent:
            all_told.set()

    members = [load.replica for load in router.loads.values()]
    polling = asyncio.create_task(EngineMetrics(config.load, lambda: members, told).run())
    # Twice: an engine that does not know the narrow question is asked the wide one at the next look.
    limit_s = 2 * max(config.load.poll_s, config.load.timeout_s)
    await asyncio.wait(
        {polling, waiting := asyncio.create_task(all_told.wait())}, timeout=limit_s, return_when="FIRST_COMPLETED"
    )
    for task in (polling, waiting):
        task.cancel()
    await asyncio.gather(polling, waiting, return_exceptions=True)
    notes += [f"{replica_id} does not tell its load, it counts as idle" for replica_id in sorted(silent)]


def _weighed(features: Features, router: Router) -> dict[str, Any]:
    decision = router.weigh(features, monotonic())
    return {
        "preference": router.preference(features),
        "primary": decision.primary,
        "replica": decision.replica_id,
        "endpoint": decision.endpoint,
        "reason": decision.reason.value,
        "prompt_tokens": decision.prompt_tokens,
        "candidates": [
            {
                "replica": candidate.replica_id,
                "endpoint": candidate.endpoint,
                "uncached_tokens": candidate.uncached_tokens,
                "work_tokens": round(candidate.work_tokens, 1),
                "in_flight": candidate.in_flight,
            }
            for candidate in decision.candidates
        ],
    }


def _why_no_affinity(request: Request, features: Features) -> str:
    if features.api is Api.OTHER:
        return f"no affinity: {request.method} on this path is no call that carries a prompt"
    if not request.body:
        return "no affinity: no session, and the request has no body"
    return "no affinity: no session, and no prompt can be read from the body"


def _request(document: Any, notes: list[str]) -> Request:
    if not isinstance(document, dict):
        notes.append("a request is a JSON object with path, headers and a body")
        document = {}
    path = document.get("path")
    if not isinstance(path, str):
        notes.append("path: missing, or no text")
        path = ""
    headers = _headers(document.get("headers"), notes)
    body = _body(document, notes)
    method = document.get("method")
    length = headers.get("content-length", "")
    length_bytes = int(length) if length.isascii() and length.isdecimal() and len(length) < 20 else None
    # A JSON body is spelled anew here, so its length says nothing.
    cut = "body" not in document and length_bytes is not None and 0 < len(body) < length_bytes
    if cut:
        notes.append(f"the body is cut off: {len(body)} of {length_bytes} bytes are there")
    return Request(
        method=method if isinstance(method, str) else "POST" if body else "GET",
        path=path,
        headers=headers,
        body=body,
        truncated=cut or document.get("truncated") is True,
        content_length_bytes=length_bytes if "body" not in document else None,
    )


def _headers(given: Any, notes: list[str]) -> Mapping[str, str]:
    """An object or a list of pairs; of a repeated header the last value counts, as with Envoy."""
    pairs = list(given.items()) if isinstance(given, dict) else given if isinstance(given, list) else []
    if given is not None and not isinstance(given, dict | list):
        notes.append("headers: neither an object nor a list of pairs")
    headers = {}
    for pair in pairs:
        match pair:
            case [str(name), [*_, str(value)] | str(value)] | (str(name), [*_, str(value)] | str(value)):
                headers[name.lower()] = value
            case [str(name), bool() | int() | float() as value] | (str(name), bool() | int() | float() as value):
                headers[name.lower()] = json.dumps(value)
            case _:
                notes.append("headers: one is left out, it is no pair of texts")
    return headers


def _body(document: dict[str, Any], notes: list[str]) -> bytes:
    present = [name for name in BODIES if document.get(name) is not None]
    if len(present) > 1:
        notes.append(f"only {present[0]} is looked at, and not {' and '.join(present[1:])}")
    if not present:
        return b""
    name, value = present[0], document[present[0]]
    try:
        if name == "body":
            # A body that is given as text is what it says, not a JSON text that says it.
            return _bytes(value) if isinstance(value, str) else json.dumps(value).encode()
        if not isinstance(value, str):
            notes.append(f"{name}: no text")
            return b""
        return _bytes(value) if name == "body_text" else base64.b64decode(value, validate=True)
    except (ValueError, RecursionError) as error:
        notes.append(f"{name}: {error}")
        return b""


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
