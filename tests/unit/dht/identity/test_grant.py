"""Whatever a constructor of a signed message takes verifies after its trip over the wire."""

import math
from dataclasses import replace
from typing import Any

import msgspec.inspect as inspected
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.identity.grant import grant, grant_refusal, is_own_word, own_word
from dht.identity.peer_id import Identity
from dht.messages import codec
from dht.messages.session import (
    Sampling,
    SessionFailed,
    SessionLeaving,
    SessionOpen,
    SessionRefused,
)
from dht.messages.types import LeaseRecord, LinksRecord, NodeRecord, Plan, PlanHead, RouteStage
from dht.records.signed import open_record, sign_record
from tests.examples import examples

ME = Identity.generate()
NOW_S = 1_790_000_000.0


def whole(info: Any) -> st.SearchStrategy[Any]:
    """Whole numbers within a field's bounds, in each type that callers give them in."""
    low = info.ge if info.ge is not None else 0 if info.gt is None else info.gt + 1
    high = info.le if info.le is not None else 1 << 20 if info.lt is None else info.lt - 1
    numbers = st.integers(low, min(high, 1 << 50))
    return numbers.flatmap(lambda n: st.sampled_from((n, float(n), numpy.int64(n))))


def real(info: Any) -> st.SearchStrategy[Any]:
    """Numbers within a field's bounds, as floats or, where they are whole, as integers."""
    low = info.ge if info.ge is not None else 0.5 if info.gt is not None else 0.0
    high = info.le if info.le is not None else 1e9
    floats = st.floats(low, min(high, 1e15))
    ints = st.integers(int(low), int(min(high, 1e15))).filter(lambda n: n >= low)
    return st.one_of(floats, ints, floats.map(numpy.float64), ints.map(numpy.int32))


def of(info: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type, as a constructor would be given them."""
    match info:
        case inspected.IntType():
            return whole(info)
        case inspected.FloatType():
            return real(info) if info.le is None or info.le < 1 << 31 else st.integers(0, 1 << 31)
        case inspected.StrType():
            least = info.min_length or 0
            return st.text("abc", min_size=least, max_size=max(least, min(info.max_length or 8, 8)))
        case inspected.BytesType():
            return st.binary(max_size=min(info.max_length or 8, 8))
        case inspected.BoolType():
            return st.booleans()
        case inspected.EnumType():
            return st.sampled_from(list(info.cls))
        case inspected.NoneType():
            return st.none()
        case inspected.UnionType():
            return st.one_of(*(of(each) for each in info.types))
        case inspected.TupleType():
            return st.tuples(*(of(each) for each in info.item_types))
        case inspected.VarTupleType():
            least = info.min_length or 0
            made = st.lists(of(info.item_type), min_size=least, max_size=least + 2)
            return made.map(tuple)
        case inspected.DictType():
            return st.dictionaries(of(info.key_type), of(info.value_type), max_size=2)
        case inspected.DataclassType(cls=cls, fields=fields):
            required = {each.name: of(each.type) for each in fields if each.required}
            optional = {each.name: of(each.type) for each in fields if not each.required}
            named = st.fixed_dictionaries(required, optional=optional)
            return named.map(lambda given: cls(**given))
    raise AssertionError(f"no values for {info}")


def values(cls: type) -> st.SearchStrategy[Any]:
    """Values of a message's class, with numbers in all types that its constructor takes."""
    return of(inspected.type_info(cls))


@given(drawn=values(SessionOpen))
def test_an_open_verifies_wherever_it_travels(drawn: SessionOpen) -> None:
    granted = grant(replace(drawn, client=ME.peer_id), ME.sign, NOW_S)
    arrived = codec.decode(codec.encode(granted))
    assert grant_refusal(arrived, NOW_S) is None
    passed_on = codec.decode(codec.encode(replace(arrived, hop=1)))
    assert grant_refusal(passed_on, NOW_S) is None


@pytest.mark.parametrize("kind", [SessionFailed, SessionLeaving, SessionRefused])
@given(data=st.data())
def test_a_stages_word_verifies_wherever_it_travels(kind: type, data: st.DataObject) -> None:
    speaker = {"peer_id": ME.peer_id} if kind is SessionLeaving else {"by": ME.peer_id}
    word = own_word(replace(data.draw(values(kind)), **speaker), ME.sign)
    assert is_own_word(codec.decode(codec.encode(word)))


@pytest.mark.parametrize("kind", [LeaseRecord, LinksRecord, NodeRecord, Plan, PlanHead])
@examples(30)
@given(data=st.data())
def test_a_record_is_read_as_its_author_meant_it(kind: type, data: st.DataObject) -> None:
    meant = data.draw(values(kind))
    assert codec.decode(codec.encode(codec.canonical(meant))) == meant


def test_a_records_expiry_may_be_a_whole_number() -> None:
    signed = sign_record(ME, "net/model/nodes", b"payload", int(NOW_S) + 10)
    assert open_record(signed, now_unix_s=NOW_S).expires_unix_s == NOW_S + 10


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temperature": True}, "temperature"),
        ({"temperature": 10**400}, "integer|int"),
        ({"top_k": 1.5}, "top_k"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": object()}, "object"),
    ],
)
def test_what_no_stage_would_take_is_refused_where_it_is_sent(
    sampling: dict[str, Any], field: str
) -> None:
    open_ = SessionOpen(
        session="12345678",
        attempt=0,
        client=ME.peer_id,
        fingerprint="f",
        route=(RouteStage(peer_id="a", start=0, end=1),),
        hop=0,
        prompt_tokens=1,
        max_new_tokens=1,
        sampling=Sampling(**sampling),
    )
    with pytest.raises(ValueError, match=f"open cannot be sent: .*({field})"):
        codec.canonical(open_)
