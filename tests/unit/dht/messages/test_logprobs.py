"""Packed log probabilities survive the wire, and nothing else passes for them."""

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.messages.codec import MalformedError
from dht.messages.logprobs import LOGPROB_MIN, TokenScore, row_bytes, unpack_scores

VOCAB = 1000
logprobs = st.floats(LOGPROB_MIN, 0.0, width=32)


@given(st.data(), st.integers(0, 20))
def test_scores_survive_the_wire(data: st.DataObject, top: int) -> None:
    pairs = st.lists(st.tuples(st.integers(0, VOCAB - 1), logprobs), min_size=top, max_size=top)
    one = st.builds(
        TokenScore, token_id=st.integers(0, 1 << 24), logprob=logprobs, top=pairs.map(tuple)
    )
    scores = tuple(data.draw(st.lists(one, max_size=5)))
    rows = ((each.logprob, *(number for pair in each.top for number in pair)) for each in scores)
    packed = b"".join(struct.pack("<f" + "If" * top, *row) for row in rows)
    assert len(packed) == len(scores) * row_bytes(top)
    assert unpack_scores(packed, [score.token_id for score in scores], top, VOCAB) == scores


def test_the_layout_stays_as_it_is() -> None:
    score = TokenScore(token_id=9, logprob=-0.5, top=((3, -0.25), (9, -0.5)))
    packed = bytes.fromhex("000000bf03000000000080be09000000000000bf")
    assert unpack_scores(packed, [9], 2, VOCAB) == (score,)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        bytes(11),
        bytes(13),
        struct.pack("<fIf", math.nan, 0, 0.0),
        struct.pack("<fIf", 0.5, 0, 0.0),
        struct.pack("<fIf", -1.0, 0, -math.inf),
        struct.pack("<fIf", -1.0, VOCAB, -1.0),
    ],
)
def test_what_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedError):
        unpack_scores(body, [1], 1, VOCAB)
