"""ext_proc messages in any order: always a reply or a clean end, and no lease is left."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

import grpc
import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from demo.wait import wait_until
from extproc.core.replica import Replica
from extproc.core.router import Router, RouterSettings
from extproc.exchange import Exchange
from extproc.messages import BodyMode
from extproc.picker import EndpointPicker
from extproc.services import EXTERNAL_PROCESSOR
from extproc.wire import UnknownMessage, decode, encode
from tests.hostile.sequences import malformed, well_formed
from tests.support.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.component.conftest import Service

FLEET = [Replica(f"replica-{number}", f"10.0.0.{number}:8000") for number in range(1, 4)]
MAX_HEAD_BYTES = 1000
FULL_DUPLEX = BodyMode.FULL_DUPLEX_STREAMED.value


def routers() -> dict[str, Router]:
    made = {
        "of a fleet": Router(),
        "without a fleet": Router(),
        "of an empty fleet": Router(),
        "that sheds": Router(RouterSettings(saturation_in_flight=0, shed=True)),
    }
    for name, members in (("of a fleet", FLEET), ("of an empty fleet", []), ("that sheds", FLEET)):
        made[name].set_members(members, monotonic())
    return made


def answered(exchange: Exchange, message: bytes) -> list[ProcessingResponse]:
    return [
        ProcessingResponse.FromString(part) for reply in exchange.receive(decode(message)) for part in encode(reply)
    ]


def in_full_duplex(message: ProcessingRequest) -> bool:
    modes = message.protocol_config
    return FULL_DUPLEX in (modes.request_body_mode, modes.response_body_mode)


@pytest.mark.parametrize("which", list(routers()))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sequence=st.lists(well_formed, max_size=10))
def test_each_message_gets_the_answer_of_its_kind_and_no_lease_is_left(which: str, sequence: list[bytes]) -> None:
    router, watch = routers()[which], Watch()
    exchange = Exchange(EndpointPicker(router, observer=watch), MAX_HEAD_BYTES)
    held = refused = False
    routed = 0
    for message in sequence:
        sent = ProcessingRequest.FromString(message)
        held |= in_full_duplex(sent)
        answers = answered(exchange, message)
        kinds = [answer.WhichOneof("response") for answer in answers]
        routed += sum("envoy.lb" in answer.dynamic_metadata for answer in answers)
        if refused:
            assert not answers
        elif "immediate_response" in kinds:
            assert kinds == ["immediate_response"]
            refused = True
        elif not held:
            assert kinds == [sent.WhichOneof("request")]
        assert router.open_leases <= 1
    exchange.close()
    exchange.close()
    assert router.open_leases == 0
    assert routed <= 1
    assert len(watch.decisions) <= 1
    assert watch.finished_count == len(watch.decisions)


@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(st.binary(max_size=600), max_size=8), late=st.lists(st.binary(max_size=10), max_size=2))
def test_a_full_duplex_body_comes_back_as_it_went(pieces: list[bytes], late: list[bytes]) -> None:
    router = routers()["of a fleet"]
    exchange = Exchange(EndpointPicker(router), MAX_HEAD_BYTES)
    opening = ProcessingRequest()
    opening.request_headers.SetInParent()
    opening.protocol_config.request_body_mode = FULL_DUPLEX
    answers = answered(exchange, opening.SerializeToString())
    for number, piece in enumerate([*pieces, b"", *late]):
        body = ProcessingRequest()
        body.request_body.body = piece
        body.request_body.end_of_stream = number >= len(pieces)
        answers += answered(exchange, body.SerializeToString())
    assert [answer.WhichOneof("response") for answer in answers].count("request_headers") == 1
    echoes = [
        answer.request_body.response.body_mutation.streamed_response
        for answer in answers
        if answer.HasField("request_body")
    ]
    assert b"".join(echo.body for echo in echoes) == b"".join(pieces)
    assert [echo.end_of_stream for echo in echoes] == [False] * (len(echoes) - 1) + [True]
    exchange.close()
    assert router.open_leases == 0


@settings(max_examples=300, deadline=None)
@given(message=malformed)
def test_bytes_that_are_no_message_are_refused_in_one_way(message: bytes) -> None:
    try:
        decode(message)
    except UnknownMessage as error:
        assert len(str(error)) < 100


def talk(channel: grpc.Channel, sequence: Iterable[bytes]) -> tuple[grpc.StatusCode, int]:
    """(how the stream ended, how many replies came).

    By gRPC's synchronous client: the asynchronous one takes a write that the end overtook for an error of its own.
    """
    call = channel.stream_stream(f"/{EXTERNAL_PROCESSOR}/Process")(iter(list(sequence)), timeout=30)
    replies = 0
    try:
        for _ in call:
            replies += 1
    except grpc.RpcError:
        pass
    return call.code(), replies


async def test_any_sequence_over_grpc_ends_cleanly_and_the_next_one_is_served(service: Service) -> None:
    service.router.set_members(FLEET, monotonic())
    opening = ProcessingRequest()
    opening.request_headers.end_of_stream = True

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(sequence=st.lists(well_formed | malformed, max_size=8))
    def run(sequence: list[bytes]) -> None:
        status, _ = talk(channel, sequence)
        assert status in {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
        wait_until(lambda: service.router.open_leases == 0, "no lease is left")
        assert talk(channel, [opening.SerializeToString()]) == (grpc.StatusCode.OK, 1)

    with grpc.insecure_channel(service.address) as channel:
        await asyncio.to_thread(run)
