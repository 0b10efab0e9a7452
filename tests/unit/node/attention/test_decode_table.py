"""Attention of one row per session: by runs, by a table, and row by row in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.attention import decode_table as module
from node.attention.decode_table import attend_rows, decode_rows
from node.attention.segment import Segment
from node.device.scripted import scripted
from tests.examples import examples

PAGE, KV_HEADS, GROUP, WIDTH = 4, 2, 3, 8


def context_of(tokens: int, slots: torch.Tensor | slice) -> Segment:
    return Segment(first=0, last=1, context_tokens=tokens, slots=slots)


def contexts_of(lengths: list[int], scattered: bool, seed: int) -> tuple[list[Segment], int]:
    pages = [-(-length // PAGE) for length in lengths]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(seed)).tolist()
    contexts, at = [], 0
    for length, count in zip(lengths, pages, strict=True):
        if scattered:
            own = torch.tensor(order[at : at + count])
            rows = (own[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
            contexts.append(context_of(length, rows))
        else:
            contexts.append(context_of(length, slice(at * PAGE, at * PAGE + length)))
        at += count
    return contexts, at * PAGE


def rows_of(context: Segment) -> torch.Tensor:
    slots = context.slots
    return torch.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots


def expected(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    contexts: list[Segment],
    sinks: torch.Tensor | None,
    window: int,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    out = torch.zeros(1, len(contexts), KV_HEADS * GROUP, WIDTH, dtype=torch.float64)
    for row, context in enumerate(contexts):
        seen = rows_of(context)[-window if window else None :]
        for head in range(KV_HEADS * GROUP):
            scores = keys[seen, head // GROUP].double() @ query[0, head, row].double() * scale
            if softcap:
                scores = torch.tanh(scores / softcap) * softcap
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1].double()])
            shares = torch.softmax(scores, dim=0)[: len(seen)]
            out[0, row, head] = shares @ values[seen, head // GROUP].double()
    return out


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    scattered=st.booleans(),
    tables_only=st.booleans(),
    window=st.sampled_from([0, 1, 5]),
    softcap=st.sampled_from([0.0, 2.0]),
    sinks=st.booleans(),
    in_script=st.booleans(),
)
@examples(60)
def test_every_way_gives_the_same(
    lengths: list[int],
    scattered: bool,
    tables_only: bool,
    window: int,
    softcap: float,
    sinks: bool,
    in_script: bool,
) -> None:
    contexts, size = contexts_of(lengths, scattered, seed=len(lengths))
    rows = decode_rows(contexts, 64, PAGE, torch.device("cpu"), tables_only=tables_only)
    if rows is None:
        assert scattered
        assert not tables_only
        assert len(lengths) * max(lengths) > module.TABLE.padded_share_max * sum(lengths)
        return
    torch.manual_seed(sum(lengths))
    keys, values = torch.randn(2, size, KV_HEADS, WIDTH)
    used = torch.cat([rows_of(context) for context in contexts])
    unused = torch.ones(size, dtype=torch.bool)
    unused[used] = False
    keys[unused], values[unused] = math.nan, math.nan  # left there by others
    slots = torch.stack([rows_of(context)[-1] for context in contexts])
    query = torch.randn(1, KV_HEADS * GROUP, len(lengths), WIDTH)
    key, value = torch.randn(2, 1, KV_HEADS, len(lengths), WIDTH)
    sink = torch.randn(KV_HEADS * GROUP) if sinks else None
    attend = scripted(attend_rows) if in_script else attend_rows
    out = attend(
        query, key, value, keys, values, slots, rows.spans, rows.table, sink, window, 0.3, softcap
    )
    torch.testing.assert_close(keys[slots], key[0].transpose(0, 1))
    wanted = expected(query, keys, values, contexts, sink, window, 0.3, softcap)
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "kv_bytes", "table"),
    [([9], 64, False), ([9, 8], 64, True), ([9, 8], 1 << 30, False), ([90, 1, 1], 64, False)],
)
def test_runs_are_copied_only_where_that_is_cheap(
    lengths: list[int], kv_bytes: int, table: bool
) -> None:
    contexts, _ = contexts_of(lengths, False, 0)
    rows = decode_rows(contexts, kv_bytes, PAGE, torch.device("cpu"), tables_only=False)
    assert rows is not None
    assert bool(rows.table.numel()) is table


@pytest.mark.parametrize(
    ("lengths", "mib_per_token", "table"),
    [
        ([9], 1, True),
        ([90, 90], 5, True),
        ([90, 90], 6, False),  # more than may be copied at all
        ([40, 1, 1], 0.5, True),
        ([90, 1, 1], 0.5, False),  # mostly padding, and much of it
    ],
)
def test_tables_for_graphs_are_bounded(
    lengths: list[int], mib_per_token: float, table: bool
) -> None:
    contexts, _ = contexts_of(lengths, True, 0)
    kv_bytes = int(mib_per_token * 2**20)
    rows = decode_rows(contexts, kv_bytes, PAGE, torch.device("cpu"), tables_only=True)
    assert (rows is not None) is table
