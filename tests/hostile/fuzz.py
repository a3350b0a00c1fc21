"""Coverage-guided fuzzing: `python -m tests.hostile.fuzz features|exchange FOLDER [libFuzzer options]`.

Beside the properties in `test_sequences`: no structure is assumed here, and whole minutes may be spent. What is raised
ends the run, and the input that did it is left in the folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import monotonic

import atheris
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

with atheris.instrument_imports(include=["extproc"]):
    from extproc.core.features import FeatureSettings, extract
    from extproc.core.replica import Replica
    from extproc.core.request import Request
    from extproc.core.router import Router
    from extproc.exchange import Exchange
    from extproc.messages import BodyMode
    from extproc.picker import EndpointPicker
    from extproc.wire import UnknownMessage, decode, encode

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages", "/invocations")
SETTINGS = FeatureSettings(mask=("date", "time", "uuid"))
ROUTER = Router()
ROUTER.set_members([Replica(f"replica-{number}", f"10.0.0.{number}:8000") for number in range(4)], monotonic())
PICKER = EndpointPicker(ROUTER)


def features(data: bytes) -> None:
    """The first byte chooses path and cut, the rest is the body."""
    choice, body = (data[0], data[1:]) if data else (0, b"")
    request = Request("POST", PATHS[choice % len(PATHS)], {}, body, truncated=choice >= 128)
    found = extract(request, SETTINGS)
    offsets = [rung.offset_bytes for rung in found.rungs]
    assert offsets == sorted(set(offsets)) and all(offset <= found.prompt_bytes for offset in offsets)
    assert found == extract(request, SETTINGS)


def exchange(data: bytes) -> None:
    """A stream of messages, each behind its length in two bytes."""
    running = Exchange(PICKER, max_head_bytes=1000)
    try:
        while data:
            length, data = int.from_bytes(data[:2], "big"), data[2:]
            message, data = data[:length], data[length:]
            for reply in running.receive(decode(message)):
                assert all(encode(reply))
    except UnknownMessage:
        pass
    running.close()
    assert ROUTER.open_leases == 0


def seeds() -> dict[str, list[bytes]]:
    """Target -> what it begins with: requests as clients send them, and the messages that carry them."""
    cases = json.loads((Path(__file__).parents[1] / "data" / "request_cases.json").read_text(encoding="utf-8"))["cases"]
    bodies = [json.dumps(request.get("body")).encode() for case in cases for request in case["requests"]]
    streams = []
    for mode in BodyMode:
        opening, body, answer = ProcessingRequest(), ProcessingRequest(), ProcessingRequest()
        opening.request_headers.headers.headers.add(key=":path", raw_value=PATHS[0].encode())
        opening.protocol_config.request_body_mode = mode.value
        body.request_body.body, body.request_body.end_of_stream = bodies[0], True
        answer.response_headers.headers.headers.add(key=":status", raw_value=b"200")
        messages = [message.SerializeToString() for message in (opening, body, answer)]
        streams.append(b"".join(len(message).to_bytes(2, "big") + message for message in messages))
    return {"features": [b"\0" + body for body in bodies], "exchange": streams}


def main(target: str, folder: Path, options: list[str]) -> None:
    """Fuzz one target; what is found worth keeping joins its folder. Never returns."""
    corpus = folder / target
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()[target]):
        (corpus / f"seed-{number}").write_bytes(seed)
    found = {"features": features, "exchange": exchange}[target]
    atheris.Setup([__file__, f"-artifact_prefix={folder}/{target}-", *options, str(corpus)], found)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
