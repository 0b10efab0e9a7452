"""Draws what a stranger may send: values of any message type, and damaged ones.

:func:`values` reads the bounds that a type announces, so a field added tomorrow is drawn, too.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from dht.identity.peer_id import Identity
from dht.messages import codec, kv, peer, session
from dht.messages.types import SINK, SOURCE

T = TypeVar("T")

PEOPLE = [Identity(number.to_bytes(32, "big")) for number in range(1, 5)]
SESSIONS = ("a" * 32, "b" * 8)
WORDS = (
    *(each.peer_id for each in PEOPLE), SOURCE, SINK, "", *SESSIONS, "float32", "0" * 64,
    "<script>", "\x00", "\u202e", "𝕏", "../..", "/ip4/1.2.3.4/tcp/5", "n/m/nodes", "%s{0}",
)  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**53, -(2**63), 2**64 - 1, 0.0, -0.0, 0.5, 1e308, 5e-324, "",
    "x", "\x00", "x" * 5000, [], [[]], [None] * 300, {}, {"x": {"x": []}}, {"": None}, "1", "-1",
)  # fmt: skip
NOT_JSON: tuple[Any, ...] = (float("nan"), float("inf"), float("-inf"), b"", b"\xff" * 70)
SHOWN_MAX = 5
"""Elements of a drawn list at most: :func:`largest` has the long ones."""


def values(cls: type[T], given: Mapping[type, st.SearchStrategy[Any]] | None = None) -> Any:
    """Values of ``cls`` within its bounds, often at them; types in ``given`` are drawn so."""
    return _of(inspect.type_info(cls), given or {})


def _of(kind: Any, given: Mapping[type, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    match kind:
        case inspect.IntType():
            low = kind.ge if kind.ge is not None else -(1 << 63)
            high = kind.le if kind.le is not None else (1 << 63) - 1
            high = kind.lt - 1 if kind.lt is not None else high
            small = st.integers(low, min(high, low + 12))
            return st.one_of(small, st.sampled_from([low, high]), st.integers(low, high))
        case inspect.FloatType():
            low = kind.ge if kind.ge is not None else kind.gt
            bounds = {"min_value": low, "max_value": kind.le, "allow_nan": False}
            drawn = st.floats(**bounds, exclude_min=kind.ge is None and low is not None)
            usual = [n for n in (0.0, 1e-9, 0.5, 1.0, 30.0, 1e6) if low is None or low < n]
            return st.one_of(st.sampled_from([n for n in usual if n <= (kind.le or n)]), drawn)
        case inspect.StrType():
            least, most = kind.min_length or 0, kind.max_length or 200
            words = [word for word in WORDS if least <= len(word) <= most] or ["x" * least]
            words.append("x" * most)
            return st.one_of(
                st.sampled_from(words), st.text(min_size=least, max_size=max(least, min(most, 40)))
            )
        case inspect.BytesType():
            least, most = kind.min_length or 0, kind.max_length or 200
            return st.binary(min_size=least, max_size=max(least, min(most, 100)))
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.EnumType():
            return st.sampled_from(list(kind.cls))
        case inspect.UnionType():
            return st.one_of(*(_of(each, given) for each in kind.types))
        case inspect.TupleType():
            return st.tuples(*(_of(each, given) for each in kind.item_types))
        case inspect.VarTupleType():
            least = kind.min_length or 0
            most = max(least, min(SHOWN_MAX, kind.max_length or SHOWN_MAX))
            return st.lists(_of(kind.item_type, given), min_size=least, max_size=most).map(tuple)
        case inspect.DataclassType():
            if kind.cls in given:
                return given[kind.cls]
            fields = {field.name: _of(field.type, given) for field in kind.fields}
            return st.builds(kind.cls, **fields)
    raise TypeError(f"no drawing of {kind}")


assert all((kv, peer, session))  # these register messages
KINDS: dict[str, type] = dict(sorted(codec._kinds.items()))
"""All messages of the protocol, by their names on the wire."""


@st.composite
def damaged(draw: st.DrawFn, value: Any, odd: tuple[Any, ...] = ODD) -> Any:
    """``value`` (lists, dictionaries and plain values) with one to three places made odd."""
    for _ in range(draw(st.integers(1, 3))):
        value = _damaged_once(draw, value, odd)
    return value


def _damaged_once(draw: st.DrawFn, value: Any, odd: tuple[Any, ...]) -> Any:
    items = list(value.items()) if isinstance(value, dict) else None
    if items is None and isinstance(value, list):
        items = list(enumerate(value))
    if not items or draw(st.integers(0, 5)) == 0:
        return draw(st.sampled_from(odd))
    place = draw(st.integers(0, len(items) - 1))
    key, inner = items[place]
    how = draw(st.integers(0, 9))
    if isinstance(value, dict):
        if how == 0:
            return {k: v for k, v in items if k != key}
        if how == 1:
            return {**value, "added": draw(st.sampled_from(odd))}
        return {**value, key: _damaged_once(draw, inner, odd)}
    if how == 0:
        return [v for at, v in items if at != key]
    if how == 1:
        return value * draw(st.sampled_from([2, 50]))
    return [_damaged_once(draw, v, odd) if at == key else v for at, v in items]


@st.composite
def damaged_message(draw: st.DrawFn, cls: type) -> bytes:
    """The envelope of a message of type ``cls``, damaged in its values or in its bytes."""
    whole = codec.encode(draw(values(cls)))
    if draw(st.booleans()):
        return draw(damaged_bytes(whole))
    return msgspec.msgpack.encode(draw(damaged(msgspec.msgpack.decode(whole), (*ODD, *NOT_JSON))))


@st.composite
def damaged_bytes(draw: st.DrawFn, whole: bytes) -> bytes:
    """``whole`` with some bytes replaced, left out, or put in."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.sampled_from([0, 1, 1, 1, 4, 1000])))
        data[at:end] = draw(st.binary(max_size=4))
    return bytes(data)
