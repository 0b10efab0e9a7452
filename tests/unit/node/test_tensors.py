"""Rows as bytes and back; bytes that do not fit are refused before anything is allocated."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.tensors import DTYPES, Rows, RowsError

COUNTS = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@given(st.sampled_from(list(DTYPES)), COUNTS, st.integers(1, 9), st.integers(0, 1000))
def test_what_is_joined_splits_into_the_same(
    dtype: str, counts: list[int], hidden: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = [
        Rows(tensor=torch.randn(count, hidden, generator=generator).to(DTYPES[dtype]))
        for count in counts
    ]
    body = Rows.join(rows)
    for given_body in (body, bytes(body)):
        back = Rows.split(given_body, dtype, hidden, counts)
        assert [tuple(part.tensor.shape) for part in back] == [(n, hidden) for n in counts]
        assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(rows, back, strict=True))


@given(COUNTS, st.integers(1, 9), st.integers(-8, 8).filter(bool))
def test_a_wrong_length_is_refused(counts: list[int], hidden: int, more: int) -> None:
    body = bytes(max(0, sum(counts) * hidden * 4 + more))
    with pytest.raises(RowsError, match="announced"):
        Rows.split(body, "float32", hidden, counts)


@pytest.mark.parametrize("dtype", ["float64", "int8", "", "object", "x" * 10_000])
def test_an_unknown_dtype_is_refused(dtype: str) -> None:
    with pytest.raises(RowsError, match="may not travel") as caught:
        Rows.split(b"\0" * 8, dtype, 2, [1])
    assert len(str(caught.value)) < 100


@pytest.mark.parametrize(
    ("hidden", "counts"), [(4, []), (4, [0]), (4, [2, -1]), (0, [1]), (-4, [-1]), (4, [0] * 10**5)]
)
def test_sizes_that_cannot_be_are_refused(hidden: int, counts: list[int]) -> None:
    body = bytes(max(0, sum(counts) * hidden * 4))
    with pytest.raises(RowsError) as caught:
        Rows.split(body, "float32", hidden, counts)
    assert len(str(caught.value)) < 200


def test_huge_announcements_allocate_nothing() -> None:
    with pytest.raises(RowsError):
        Rows.split(b"1234", "float32", 1 << 40, [1 << 40])


def test_rows_that_are_views_are_joined_in_their_order() -> None:
    whole = torch.arange(24.0).view(6, 4)
    body = Rows.join([Rows(tensor=whole[4:6]), Rows(tensor=whole.t()[:2, :4])])
    expected = torch.cat([whole[4:6], whole.t()[:2, :4]])
    assert torch.equal(Rows.split(body, "float32", 4, [4])[0].tensor, expected)
