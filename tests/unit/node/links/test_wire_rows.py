"""Rows as bytes and back; bytes that do not fit are refused before anything is allocated."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.device.tensors import DTYPES
from node.links.wire_rows import (
    BLOCK,
    INT8,
    SCALE_BYTES,
    RowsError,
    feature_bytes,
    join_rows,
    packed_features,
    quantized,
    split_features,
    split_rows,
)

COUNTS = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@given(st.sampled_from(list(DTYPES)), COUNTS, st.integers(1, 9), st.integers(0, 1000))
def test_what_is_joined_splits_into_the_same(
    dtype: str, counts: list[int], hidden: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(count, hidden, generator=generator).to(DTYPES[dtype]) for count in counts]
    body = join_rows(rows)
    for given_body in (body, bytes(body)):
        back = split_rows(given_body, dtype, hidden, counts, dtype)
        assert [tuple(part.shape) for part in back] == [(n, hidden) for n in counts]
        assert all(torch.equal(a, b) for a, b in zip(rows, back, strict=True))


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("sent", list(DTYPES))
def test_rows_of_a_peer_that_computes_in_another_dtype_are_rounded_once(
    sent: str, dtype: str
) -> None:
    rows = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).to(DTYPES[sent])
    first, second = split_rows(join_rows([rows]), sent, 8, [2, 3], dtype)
    assert torch.equal(torch.cat([first, second]), rows.to(DTYPES[dtype]))


@given(COUNTS, st.integers(1, 9), st.integers(-8, 8).filter(bool))
def test_a_wrong_length_is_refused(counts: list[int], hidden: int, more: int) -> None:
    body = bytes(max(0, sum(counts) * hidden * 4 + more))
    with pytest.raises(RowsError, match="announced"):
        split_rows(body, "float32", hidden, counts, "float32")


@pytest.mark.parametrize("dtype", ["float64", "int16", "", "object", "x" * 10_000])
def test_an_unknown_dtype_is_refused(dtype: str) -> None:
    with pytest.raises(RowsError, match="may not travel") as caught:
        split_rows(b"\0" * 8, dtype, 2, [1], "float32")
    assert len(str(caught.value)) < 100


@pytest.mark.parametrize(
    ("hidden", "counts"), [(4, []), (4, [0]), (4, [2, -1]), (0, [1]), (-4, [-1]), (4, [0] * 10**5)]
)
def test_sizes_that_cannot_be_are_refused(hidden: int, counts: list[int]) -> None:
    body = bytes(max(0, sum(counts) * hidden * 4))
    with pytest.raises(RowsError) as caught:
        split_rows(body, "float32", hidden, counts, "float32")
    assert len(str(caught.value)) < 200


def test_huge_announcements_allocate_nothing() -> None:
    with pytest.raises(RowsError):
        split_rows(b"1234", "float32", 1 << 40, [1 << 40], "float32")


def test_rows_that_are_views_are_joined_in_their_order() -> None:
    whole = torch.arange(24.0).view(6, 4)
    body = join_rows([whole[4:6], whole.t()[:2, :4]])
    expected = torch.cat([whole[4:6], whole.t()[:2, :4]])
    assert torch.equal(split_rows(body, "float32", 4, [4], "float32")[0], expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_int8_rows_come_back_within_half_a_step_of_their_scale(dtype: str) -> None:
    values = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    values[2] = 0
    body = join_rows([values])
    packed = quantized(body, dtype, 64)
    assert len(packed) == 5 * (64 + SCALE_BYTES)
    first, second = split_rows(packed, INT8, 64, [2, 3], dtype)
    back = torch.cat([first, second])
    assert back.dtype == DTYPES[dtype]
    step = values.float().abs().amax(dim=1, keepdim=True) / 127
    slack = 2 * torch.finfo(DTYPES[dtype]).eps * values.float().abs()
    assert ((back.float() - values.float()).abs() <= step / 2 + slack + 1e-9).all()
    assert (back[2] == 0).all()


def test_int8_rows_of_a_wrong_length_or_scale_are_refused() -> None:
    packed = quantized(join_rows([torch.ones(2, 8)]), "float32", 8)
    with pytest.raises(RowsError, match="23 bytes of activations where 24"):
        split_rows(packed[:-1], INT8, 8, [2], "float32")
    with pytest.raises(RowsError, match="cannot be"):
        split_rows(packed, INT8, 8, [2, 0], "float32")
    nan = torch.tensor([float("nan")]).numpy().tobytes() + packed[4:]
    with pytest.raises(RowsError, match="no finite number"):
        split_rows(nan, INT8, 8, [2], "float32")


@given(
    st.sampled_from(list(DTYPES)),
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
    st.sampled_from([1, 3, 48, 64, 192]),
    st.integers(0, 1000),
)
def test_features_come_back_but_for_rounding(
    dtype: str, counts: list[int], hidden: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(count, hidden, generator=generator) for count in counts]
    for vectors in made:
        vectors[:, 0] *= 1000  # as some numbers of hidden states are
    body = b"".join(packed_features(vectors.to(DTYPES[dtype])) for vectors in made)
    assert len(body) == sum(counts) * feature_bytes(hidden)
    for one, other in zip(made, split_features(body, hidden, counts, dtype), strict=True):
        assert other.dtype is DTYPES[dtype]
        assert one.shape == other.shape
        if (behind := one[:, BLOCK:]).numel():  # those that share no scale with the large one
            least = behind.abs().max() / 50
            assert float((behind - other.float()[:, BLOCK:]).abs().max()) <= float(least)


def test_features_that_are_not_finite_neither_leave_nor_come() -> None:
    sound = packed_features(torch.ones(1, 64))
    assert not packed_features(torch.tensor([[1.0] * 63 + [float("nan")]]))
    strange = torch.tensor([float("inf")]).view(torch.uint8).numpy().tobytes() + sound[4:]
    one, other = split_features(sound + strange, 64, [1, 1], "float32")
    assert len(one) == 1
    assert len(other) == 0
    (large,) = split_features(packed_features(torch.full((1, 64), 1e30)), 64, [1], "float16")
    assert len(large) == 0


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(1, 70), st.integers(-9, 9))
def test_features_of_another_length_are_refused(counts: list[int], hidden: int, more: int) -> None:
    size = sum(counts) * feature_bytes(hidden) + more
    if more == 0 or size < 0:
        return
    with pytest.raises(RowsError, match="announced"):
        split_features(bytes(size), hidden, counts, "float32")
