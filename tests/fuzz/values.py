"""Makes what a stranger may send out of decisions: values of any message type, and damaged ones.

:func:`value_of` reads the bounds that a type announces, so a field added tomorrow is drawn, too.
"""

import struct
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import inspect

from dht.identity.peer_id import Identity
from dht.messages import codec, kv, peer, session
from dht.messages.types import SINK, SOURCE
from tests.choices import Choices

PEOPLE = [Identity(number.to_bytes(32, "big")) for number in range(1, 5)]
SESSIONS = ("a" * 32, "b" * 8)
WORDS = (
    *(each.peer_id for each in PEOPLE), SOURCE, SINK, "", *SESSIONS, "float32", "0" * 64,
    "<script>", "\x00", "\u202e", "𝕏", "../..", "/ip4/1.2.3.4/tcp/5", "n/m/nodes", "%s{0}", "::1%/",
)  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**53, -(2**63), 2**64 - 1, 0.0, -0.0, 0.5, 1e308, 5e-324, "",
    "x", "\x00", "x" * 5000, [], [[]], [None] * 300, {}, {"x": {"x": []}}, {"": None}, "1", "-1",
)  # fmt: skip
NOT_JSON: tuple[Any, ...] = (float("nan"), float("inf"), float("-inf"), b"", b"\xff" * 70)
ITEMS_MAX = 5
"""Elements of a drawn list at most."""
FLOATS = (0.0, 1e-9, 0.5, 1.0, 30.0, 1e6)

Maker = Callable[[Choices], Any]

assert all((kv, peer, session))  # these register messages
KINDS: dict[str, type] = dict(sorted(codec._kinds.items()))
"""All messages of the protocol, by their names on the wire."""


def value_of(cls: type, drawn: Choices, given: Mapping[type, Maker] | None = None) -> Any:
    """A value of ``cls`` within its bounds, often at them; types in ``given`` are made so."""
    return _of(_info(cls), drawn, given or {})


@lru_cache
def _info(cls: type) -> Any:
    return inspect.type_info(cls)


def _of(kind: Any, drawn: Choices, given: Mapping[type, Maker]) -> Any:
    match kind:
        case inspect.IntType():
            return _int(kind, drawn)
        case inspect.FloatType():
            return _float(kind, drawn)
        case inspect.StrType():
            least, most = kind.min_length or 0, kind.max_length or 200
            word = drawn.one_of(WORDS)
            return word if least <= len(word) <= most else "x" * drawn.one_of((least, most))
        case inspect.BytesType():
            least, most = kind.min_length or 0, kind.max_length or 200
            size = max(least, min(most, drawn.one_of((least, 8, most))))
            return bytes([drawn.below(256)]) * min(size, 100 + least)
        case inspect.BoolType():
            return drawn.yes()
        case inspect.NoneType():
            return None
        case inspect.EnumType():
            return drawn.one_of(list(kind.cls))
        case inspect.UnionType():
            return _of(drawn.one_of(kind.types), drawn, given)
        case inspect.TupleType():
            return tuple(_of(each, drawn, given) for each in kind.item_types)
        case inspect.VarTupleType():
            least = kind.min_length or 0
            most = max(least, min(ITEMS_MAX, kind.max_length or ITEMS_MAX))
            count = least + drawn.below(most - least + 1)
            return tuple(_of(kind.item_type, drawn, given) for _ in range(count))
        case inspect.DataclassType():
            if kind.cls in given:
                return given[kind.cls](drawn)
            fields = {each.name: _of(each.type, drawn, given) for each in kind.fields}
            return kind.cls(**fields)
    raise TypeError(f"nothing is made of {kind}")


def _int(kind: Any, drawn: Choices) -> int:
    low = kind.ge if kind.ge is not None else -(1 << 63)
    high = kind.le if kind.le is not None else (1 << 63) - 1
    high = kind.lt - 1 if kind.lt is not None else high
    match drawn.below(6):
        case 0:
            return high
        case 1:
            return low + _wide(drawn) % (high - low + 1)
        case _:
            return min(high, low + drawn.below(13))


def _float(kind: Any, drawn: Choices) -> float:
    low, high = kind.ge if kind.ge is not None else kind.gt, kind.le
    match drawn.below(8):
        case 0 if high is not None:
            return float(high)
        case 1:
            (number,) = struct.unpack("<d", _wide(drawn).to_bytes(8, "little"))
        case 2 if low is not None and kind.ge is not None:
            return float(low)
        case _:
            number = drawn.one_of(FLOATS)
    inside = (low is None or number > low) and number <= (1e308 if high is None else high)
    return number if inside else min(1.0, 1.0 if high is None else float(high))


def _wide(drawn: Choices) -> int:
    return int.from_bytes(bytes(drawn.below(256) for _ in range(8)), "little")


REPEATED_MAX = 10_000
"""Items to which a list is repeated: more than any bound of ours allows."""


def damaged(value: Any, drawn: Choices, odd: tuple[Any, ...] = ODD) -> Any:
    """``value`` (lists, dictionaries and plain values) with one to three places made odd."""
    for _ in range(1 + drawn.below(3)):
        value = _damaged_once(value, drawn, odd)
    return value


def _damaged_once(value: Any, drawn: Choices, odd: tuple[Any, ...]) -> Any:
    items = list(value.items()) if isinstance(value, dict) else []
    if isinstance(value, list):
        items = list(enumerate(value))
    if not items or drawn.below(6) == 0:
        return drawn.one_of(odd)
    key, inner = drawn.one_of(items[:256])
    how = drawn.below(10)
    if isinstance(value, dict):
        if how == 0:
            return {k: v for k, v in items if k != key}
        if how == 1:
            return {**value, "added": drawn.one_of(odd)}
        return {**value, key: _damaged_once(inner, drawn, odd)}
    if how == 0:
        return [v for at, v in items if at != key]
    if how == 1:
        return (value * drawn.one_of((2, 50)))[:REPEATED_MAX]  # thrice fifty times is no message
    return [_damaged_once(v, drawn, odd) if at == key else v for at, v in items]


def damaged_message(cls: type, drawn: Choices) -> bytes:
    """The envelope of a message of type ``cls``, damaged in its values or in its bytes."""
    whole = codec.encode(value_of(cls, drawn))
    if drawn.yes():
        return damaged_bytes(whole, drawn)
    return msgspec.msgpack.encode(damaged(msgspec.msgpack.decode(whole), drawn, ODD + NOT_JSON))


def damaged_bytes(whole: bytes, drawn: Choices) -> bytes:
    """``whole`` with some bytes replaced, left out, or put in."""
    data = bytearray(whole)
    for _ in range(1 + drawn.below(4)):
        at = (drawn.below(256) << 8 | drawn.below(256)) % (len(data) + 1)
        end = min(len(data), at + drawn.one_of((0, 1, 1, 1, 4, 1000)))
        data[at:end] = bytes(drawn.below(256) for _ in range(drawn.below(5)))
    return bytes(data)
