"""Frames of the agent's protocol, and finding one's own session in a stream that holds others' remains."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imaged.errors import FormatError
from vmm import agentproto
from vmm.agentproto import GREETING, HEADER, WELCOME_MAGIC, Frame, Incoming, Kind

HOST, AGENT = b"hhhhhhhh", b"aaaaaaaa"


def welcome(nonce: bytes = HOST, version: int = agentproto.VERSION) -> bytes:
    return GREETING.pack(WELCOME_MAGIC, version, AGENT, nonce)


def frame(kind: Kind, payload: bytes) -> bytes:
    return agentproto.pack(kind, payload, HOST)


def test_sizes_are_those_of_the_format() -> None:
    assert (GREETING.size, HEADER.size, agentproto.PAYLOAD_MAX) == (40, 4, 32756)
    assert len(agentproto.hello(HOST)) == GREETING.size
    assert agentproto.pack(Kind.SIGNAL, b"\x02", AGENT) == b"\x05\0\0\x01\x02aaaaaaaa"


def test_a_frame_holds_no_more_than_a_port_takes_in_one_write() -> None:
    assert len(frame(Kind.STDIN, bytes(agentproto.PAYLOAD_MAX))) == agentproto.FRAME_BYTES
    with pytest.raises(ValueError, match="32757"):
        frame(Kind.STDIN, bytes(agentproto.PAYLOAD_MAX + 1))


@given(
    st.binary(max_size=200),
    st.lists(st.tuples(st.sampled_from([Kind.STDOUT, Kind.STDERR, Kind.CREDIT]), st.binary(max_size=50)), max_size=5),
    st.lists(st.integers(min_value=1, max_value=60), max_size=40),
)
def test_frames_arrive_whole_however_the_bytes_come(
    stale: bytes, frames: list[tuple[Kind, bytes]], cuts: list[int]
) -> None:
    old = welcome(b"another!") + agentproto.pack(Kind.STDOUT, stale, b"another!")
    stream = stale + old + old[: len(stale)] + welcome() + b"".join(frame(kind, payload) for kind, payload in frames)
    incoming, found, position = Incoming(HOST), list[Frame](), 0
    for cut in [*cuts, len(stream)]:
        found += incoming.feed(stream[position : position + cut])
        position += cut
    found += incoming.feed(stream[position:])
    assert found == [Frame(kind, payload) for kind, payload in frames]
    assert incoming.agent_nonce == AGENT


def test_a_welcome_said_twice_is_one() -> None:
    incoming = Incoming(HOST)
    again = welcome() + welcome() + frame(Kind.PONG, b"1") + welcome() + frame(Kind.PONG, b"2")
    frames = [found for byte in again for found in incoming.feed(bytes([byte]))]
    assert frames == [Frame(Kind.PONG, b"1"), Frame(Kind.PONG, b"2")]


def test_another_version_is_told() -> None:
    incoming = Incoming(HOST)
    incoming.feed(welcome(version=7))
    assert incoming.version == 7


def test_bytes_of_another_session_after_the_welcome_are_an_error() -> None:
    with pytest.raises(FormatError, match="this session's nonce"):
        Incoming(HOST).feed(welcome() + agentproto.pack(Kind.STDOUT, b"x", b"another!"))
    with pytest.raises(FormatError, match="known kind"):
        Incoming(HOST).feed(welcome() + HEADER.pack(0x7F, 0) + HOST)


def test_an_agent_that_begins_ends_a_session_with_the_one_before() -> None:
    begun = agentproto.pack(Kind.BEGUN, b"", agentproto.NOBODY)
    assert begun == b"\x49\0\0\0" + bytes(8)
    stream = begun + welcome() + frame(Kind.STDOUT, b"x") + begun
    incoming = Incoming(HOST)
    frames = [found for byte in stream for found in incoming.feed(bytes([byte]))]
    assert frames == [Frame(Kind.STDOUT, b"x"), Frame(Kind.BEGUN, b"")]


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=1), st.binary(max_size=300))))
def test_fields_come_back(items: list[tuple[bytes, bytes]]) -> None:
    assert list(agentproto.parse_fields(agentproto.fields(items))) == items


@pytest.mark.parametrize("data", [b"a", b"a\0\0\0", b"a\0\0\0\x02x"])
def test_fields_that_are_cut_off_are_an_error(data: bytes) -> None:
    with pytest.raises(FormatError):
        list(agentproto.parse_fields(data))


def test_payloads_of_the_wrong_size_are_errors() -> None:
    assert agentproto.ended(b"\x03\0\0") == (3, 0, False)
    assert agentproto.credit(b"\0\0\x01\0") == 256
    assert agentproto.refused(b"\x7fno such file") == (127, "no such file")
    assert agentproto.refused(b"\x7f" + b"x" * 32_000) == (127, "x" * agentproto.TEXT_MAX)
    for parse in (agentproto.ended, agentproto.credit, agentproto.refused):
        with pytest.raises(FormatError):
            parse(b"")
