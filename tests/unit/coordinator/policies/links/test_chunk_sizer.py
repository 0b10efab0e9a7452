"""Chunks follow what steps and links were measured to take."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.policies.failure.detector import WatchConfig
from coordinator.policies.links.chunk_sizer import (
    CANDIDATES,
    ChunkConfig,
    ChunkSizer,
)

CONFIG = ChunkConfig()


def sizer(fixed_s: float, row_s: float) -> ChunkSizer:
    made = ChunkSizer()
    made.ran(1, fixed_s, decodes_only=True)
    made.ran(128, fixed_s + 128 * row_s, decodes_only=False)
    return made


def through_s(made: ChunkSizer, rows: int, tokens: int, stages: int, link_row_s: float) -> float:
    """A prompt through a pipeline, chunk by chunk: the recurrence that the formula sums up."""
    ends = [0.0] * (2 * stages - 1)
    at = 0
    while at < tokens:
        here = min(rows, tokens - at)
        ready = 0.0
        for part in range(len(ends)):
            takes = (made.step_s(here) or 0.0) if part % 2 == 0 else link_row_s * here
            ready = ends[part] = max(ready, ends[part]) + takes
        at += here
    return ends[-1]


@given(
    st.floats(1e-4, 0.05),
    st.floats(1e-6, 2e-3),
    st.floats(0, 1e-2),
    st.integers(1, 4000),
    st.integers(1, 5),
)
def test_the_choice_is_close_to_the_best_of_the_candidates(
    fixed_s: float, row_s: float, link_row_s: float, tokens: int, stages: int
) -> None:
    made = sizer(fixed_s, row_s)
    chosen = made.choose(tokens, stages, link_row_s=link_row_s, others_decode=False)
    best_s = min(through_s(made, rows, tokens, stages, link_row_s) for rows in CANDIDATES)
    assert through_s(made, chosen, tokens, stages, link_row_s) <= 1.35 * best_s


def test_one_stage_runs_a_prompt_in_large_chunks_and_many_stages_in_small_ones() -> None:
    made = sizer(2e-3, 1e-4)
    alone = made.choose(1000, 1, link_row_s=None, others_decode=False)
    many = made.choose(1000, 4, link_row_s=1e-6, others_decode=False)
    assert alone == 512
    assert many < 128


def test_a_slow_link_asks_for_small_chunks() -> None:
    made = sizer(5e-3, 5e-5)
    assert made.choose(1000, 3, link_row_s=6.5e-4, others_decode=False) <= 16


def test_chunks_shrink_as_rows_become_dearer() -> None:
    made = sizer(2e-3, 2e-5)
    early = made.choose(4000, 3, link_row_s=1e-6, others_decode=False)
    assert (
        made.choose(4000, 3, link_row_s=None, others_decode=False) <= CONFIG.chunk_tokens_unmeasured
    )
    for _ in range(30):
        made.ran(early, 2e-3 + early * 4e-4, decodes_only=False)
    assert made.choose(4000, 3, link_row_s=1e-6, others_decode=False) < early


def test_decodes_of_others_bound_a_chunk() -> None:
    made = sizer(5e-3, 2e-3)
    assert made.choose(1000, 1, link_row_s=None, others_decode=False) == 512
    assert made.choose(1000, 1, link_row_s=None, others_decode=True) == 32


@pytest.mark.parametrize(("row_s", "rows"), [(0.001, 512), (0.03, 64), (0.1, 16), (9.0, 16)])
def test_no_chunk_takes_so_long_that_its_peer_is_given_up(row_s: float, rows: int) -> None:
    assert WatchConfig().most_s == 2 * CONFIG.step_s_max
    sizer = ChunkSizer(fixed_s=0.1, row_s=row_s)
    assert sizer.choose(2000, 1, link_row_s=None, others_decode=False) == rows


def test_nothing_measured_and_nonsense() -> None:
    made = ChunkSizer()
    made.ran(0, 1.0, decodes_only=False)
    made.ran(64, float("nan"), decodes_only=True)
    made.ran(64, -1.0, decodes_only=False)
    chosen = made.choose(1000, 2, link_row_s=None, others_decode=True)
    assert chosen == CONFIG.chunk_tokens_unmeasured


def test_rows_beside_decodes_lengthen_a_step_by_little() -> None:
    sizer = ChunkSizer()
    assert sizer.beside() == CONFIG.beside_tokens_least
    sizer.ran(4, 0.010, decodes_only=True)
    sizer.ran(100, 0.015, decodes_only=False)  # 50 us a row, 500 us of room
    assert sizer.beside() == 10
    slow, free = ChunkSizer(fixed_s=0.01, row_s=0.01), ChunkSizer(fixed_s=0.01, row_s=0.0)
    assert slow.beside() == CONFIG.beside_tokens_least
    assert free.beside() == CONFIG.beside_tokens_most
