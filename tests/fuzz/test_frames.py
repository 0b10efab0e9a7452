"""Frames of every kind, whole and damaged: a message comes out or the stream is malformed."""

import asyncio
import contextlib
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from hypothesis import given
from msgspec import inspect

from dht.budget import FRAME_BYTES, Budget
from dht.errors import NetworkError
from dht.messages import codec
from dht.messages.codec import MalformedError
from dht.messages.session import FramePart
from dht.transport.streams import stream_pair
from node.links.framed_stream import LinkReader
from tests.choices import Choices, choices
from tests.examples import examples
from tests.fuzz.laws import lawful
from tests.fuzz.values import KINDS, damaged_bytes, damaged_message, value_of

pytestmark = pytest.mark.property
VALUES_MAX = 1 << 21


def leaves(value: Any) -> Iterator[Any]:
    """All plain values within a message."""
    if is_dataclass(value):
        for field in fields(value):
            yield from leaves(getattr(value, field.name))
    elif isinstance(value, tuple):
        for each in value:
            yield from leaves(each)
    else:
        yield value


def most_values(kind: Any) -> float:
    """Values that one of this type may hold at most; infinite where its bounds say nothing."""
    match kind:
        case inspect.VarTupleType() | inspect.StrType() | inspect.BytesType() if (
            kind.max_length is None
        ):
            return math.inf
        case inspect.VarTupleType():
            return 1 + kind.max_length * most_values(kind.item_type)
        case inspect.TupleType():
            return 1 + sum(map(most_values, kind.item_types))
        case inspect.UnionType():
            return max(map(most_values, kind.types))
        case inspect.DataclassType():
            return 1 + sum(most_values(field.type) for field in kind.fields)
    return 1


@pytest.mark.parametrize("kind", codec._framed)
def test_a_frame_makes_a_bounded_number_of_values(kind: str) -> None:
    """A byte on the wire may be a whole string here: a frame of 8 MiB must not be 200 MiB."""
    assert most_values(inspect.type_info(KINDS[kind])) < VALUES_MAX


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - codec._framed.keys()))
@examples(2)
@given(drawn=choices(300))
def test_a_record_is_no_frame(kind: str, drawn: Choices) -> None:
    frame = codec.encode_frame(value_of(KINDS[kind], drawn))
    with pytest.raises(MalformedError, match="unknown message kind"):
        codec.decode_frame(memoryview(frame))


@pytest.mark.parametrize("kind", KINDS)
@examples(3)
@given(drawn=choices(300))
def test_every_kind_survives_the_wire(kind: str, drawn: Choices) -> None:
    message = value_of(KINDS[kind], drawn)
    encoded = codec.encode(message)
    assert lawful(lambda: codec.decode(encoded), ()) == message


@pytest.mark.parametrize("kind", KINDS)
@examples(6)
@given(drawn=choices(300))
def test_a_damaged_message_is_within_its_bounds_or_malformed(kind: str, drawn: Choices) -> None:
    encoded = damaged_message(KINDS[kind], drawn)
    message = lawful(lambda: codec.decode(encoded), MalformedError)
    if message is not None:
        assert all(math.isfinite(n) for n in leaves(message) if isinstance(n, float))
        assert codec.decode(codec.encode(message)) == message


@given(choices(600))
def test_damaged_frames_follow_one_another_until_one_is_malformed(drawn: Choices) -> None:
    kinds = sorted(codec._framed)
    frames = [
        codec.encode_frame(value_of(KINDS[drawn.one_of(kinds)], drawn), bytes(drawn.below(256)))
        for _ in range(drawn.below(4))
    ]
    sent = damaged_bytes(b"".join(frames), drawn)

    async def read() -> None:
        near, far = stream_pair("near", "far")
        near.write(sent)
        await near.close()
        while True:
            await codec.read_frame(far)

    lawful(lambda: asyncio.run(read()), (MalformedError, NetworkError))


@given(choices(100))
def test_parts_of_frames_make_frames_or_are_malformed(drawn: Choices) -> None:
    near, far = stream_pair("near", "far")
    for _ in range(drawn.below(13)):
        part = FramePart(
            number=drawn.below(4),
            offset=drawn.one_of((0, 1, 5, 40)),
            total_bytes=drawn.one_of((1, 5, 40, codec.FRAME_BOUNDS.bytes_max)),
            slow=drawn.yes(),
        )
        near.write(codec.encode_frame(part, bytes(drawn.below(41))))

    async def read() -> None:
        await near.close()
        budget = Budget()
        reader = LinkReader(far, budget)
        try:
            with contextlib.suppress(NetworkError, MalformedError):
                while True:
                    await reader.read()
        finally:
            reader.close()
            assert budget.held(FRAME_BYTES).total == 0

    asyncio.run(read())
