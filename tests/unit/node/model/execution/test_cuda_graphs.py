"""Decode steps padded to buckets: the same answers, nobody's rows touched, eager where it fails."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dht.messages.session import Sampling
from node.attention.decode_table import DecodeRows
from node.attention.paged_attention import Step
from node.engine.engine import Engine, WorkItem
from node.model.execution import cuda_graphs
from node.model.execution.cuda_graphs import (
    COLUMNS_LEAST,
    ROW_BUCKETS,
    Buffers,
    CudaCapture,
    CudaGraphs,
    column_bucket,
    row_bucket,
)
from testing.tiny_families import make
from tests.unit.node.engines import loaded
from tests.unit.node.kv.accounts import check_pool

LAYERS = 4


def engine_of(directory: Path, device: str = "cpu") -> Engine:
    return loaded(directory, device=device, memory_bytes=32 << 20)


def again(body: Callable[[], None]) -> Callable[[], None]:
    """What captures on a CPU: nothing, the body runs each time."""
    body()
    return body


def with_graphs(engine: Engine, capture: Callable[..., Callable[[], None]] = again) -> CudaGraphs:
    flow = engine.loaded.forward
    flow.graphs = CudaGraphs(flow._as_they_are, capture)
    return flow.graphs


def answers(engine: Engine, prompts: list[tuple[int, ...]], new: int) -> list[list[int]]:
    """Greedy answers; each session one token further in each step once its prompt is through."""
    out: list[list[int]] = []
    for n, prompt in enumerate(prompts):
        assert engine.kv.reserve(str(n), len(prompt) + new) is None
        out.append([])
    for turn in range(new):
        items = [
            WorkItem(
                session=str(n), start=0, end=engine.spec.layers,
                position=0 if turn == 0 else len(prompt) + turn - 1,
                token_ids=prompt if turn == 0 else (out[n][-1],),
                sampling=Sampling(),
            )
            for n, prompt in enumerate(prompts)
        ]  # fmt: skip
        for n, result in enumerate(engine.step(items)):
            assert result.token_id is not None, result.error
            out[n].append(result.token_id)
    check_pool(engine.kv)
    for n in range(len(prompts)):
        engine.kv.free(str(n))
    return out


PROMPTS = [(3, 4, 5), tuple(range(1, 40)), (9,), (8, 8, 8, 8), tuple(range(20, 90))]


@given(rows=st.integers(1, 400), columns=st.integers(1, 1 << 17))
def test_buckets_hold_what_they_are_asked_for(rows: int, columns: int) -> None:
    size = row_bucket(rows)
    if size is None:
        assert rows > ROW_BUCKETS[-1]
    else:
        assert rows <= size < 2 * rows or size == 1
    assert columns <= column_bucket(columns)
    assert column_bucket(columns) < 2 * columns or columns <= COLUMNS_LEAST


@given(
    turns=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 10), st.integers(0, 99)), min_size=1, max_size=4
    )
)
def test_what_was_staged_before_is_gone(turns: list[tuple[int, int, int]]) -> None:
    buffers = Buffers.of(4, 10, torch.zeros(1, 3), scrap_row=77)
    for count, columns, first in turns:
        slots = torch.arange(count) + first
        table = torch.arange(count * columns).view(count, columns) + first
        spans = torch.arange(count * 2).view(count, 2) + first
        step = Step(
            pools={}, write_slots=slots, segments=[], decode=DecodeRows(spans=spans, table=table)
        )
        buffers.stage(torch.full((count, 3), 1.0 + first), slots + 1, step)
        assert buffers.decode is not None
        assert torch.equal(buffers.hidden[:count], torch.full((count, 3), 1.0 + first))
        assert not buffers.hidden[count:].any()
        assert torch.equal(buffers.slots, torch.cat([slots, torch.full((4 - count,), 77)]))
        assert torch.equal(buffers.positions[:count], slots + 1)
        assert torch.equal(buffers.decode.spans[:count], spans)
        assert torch.equal(buffers.decode.table[:count, :columns], table)
        assert (buffers.decode.table[:count, columns:] == table[:, -1:]).all()
        assert (buffers.decode.table[count:] == 77).all()
        assert (buffers.decode.spans[count:] == 1).all()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mistral", "deepseek_v2"])
@pytest.mark.parametrize("sessions", [1, 3, 5])
def test_padded_steps_answer_the_same(family: str, sessions: int, tmp_path: Path) -> None:
    make(tmp_path, family)
    expected = answers(engine_of(tmp_path), PROMPTS[:sessions], 6)
    engine = engine_of(tmp_path)
    graphs = with_graphs(engine)
    assert answers(engine, PROMPTS[:sessions], 6) == expected
    whole = family != "deepseek_v2"  # its mixtures of experts look at numbers
    assert len(graphs) == (1 if whole else 0)


def test_padding_writes_to_nobodys_rows(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    engine = engine_of(tmp_path)
    graphs = with_graphs(engine)
    answers(engine, PROMPTS[:3], 2)  # three rows in a bucket of four
    for pool in engine._pools.values():
        pool.keys[:-1], pool.values[:-1] = 5.0, 6.0
        pool.keys[-1], pool.values[-1] = 0.0, 0.0
    for n in range(3):
        assert engine.kv.reserve(str(n), 8) is None
    items = [
        WorkItem(session=str(n), start=0, end=LAYERS, position=0, token_ids=(n + 1,))
        for n in range(3)
    ]
    assert [result.error for result in engine.step(items)] == [None] * 3
    written = {engine.kv.get(str(n)).pages[0] * engine.config.page_tokens for n in range(3)}  # type: ignore[union-attr]
    assert len(graphs) == 1
    for pool in engine._pools.values():
        assert pool.scrap_row == engine.kv.free_tokens + 3 * engine.config.page_tokens
        changed = (pool.keys[:-1] != 5.0).flatten(1).any(1) | (pool.values[:-1] != 6.0).flatten(
            1
        ).any(1)
        assert set(changed.nonzero().flatten().tolist()) == written


def test_sizes_share_graphs_and_layers_that_change_take_theirs_along(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    engine = engine_of(tmp_path)
    graphs = with_graphs(engine)
    answers(engine, PROMPTS[:3], 3)
    answers(engine, [PROMPTS[0]] * 4, 3)
    assert len(graphs) == 1  # one for three rows and for four
    answers(engine, PROMPTS[:1], 3)
    assert len(graphs) == 2
    engine.load(0, LAYERS)
    assert len(graphs) == 0
    assert answers(engine, PROMPTS[:2], 3) == answers(engine_of(tmp_path), PROMPTS[:2], 3)


class _OutOfResources(Exception):
    """Like Triton's, which derives from nothing more special."""


@pytest.mark.parametrize("kind", [RuntimeError, _OutOfResources])
def test_where_capturing_fails_layers_run_as_they_are(
    kind: type[Exception], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, "llama")
    tried = []

    def fails(body: Callable[[], None]) -> Callable[[], None]:
        tried.append(body)
        raise kind("operation not permitted when stream is capturing\nmore")

    engine = engine_of(tmp_path)
    with_graphs(engine, fails)
    with caplog.at_level(logging.WARNING, logger="node.model.execution.cuda_graphs"):
        assert answers(engine, PROMPTS, 4) == answers(engine_of(tmp_path), PROMPTS, 4)
    assert len(tried) == 1  # not at every step
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "layers [0, 4) run without graphs: operation not permitted when stream is capturing"
    ]


def test_what_looks_at_numbers_is_never_captured(tmp_path: Path) -> None:
    make(tmp_path, "qwen3_moe")
    engine = engine_of(tmp_path)
    graphs = with_graphs(engine)
    assert answers(engine, PROMPTS, 3) == answers(engine_of(tmp_path), PROMPTS, 3)
    assert len(graphs) == 0


def test_a_size_that_does_not_fit_leaves_the_others_their_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "llama")
    tried: list[int] = []

    def short(body: Callable[[], None]) -> Callable[[], None]:
        tried.append(1)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return again(body)

    expected = answers(engine_of(tmp_path), PROMPTS, 3)
    engine = engine_of(tmp_path)
    graphs = with_graphs(engine, short)
    assert answers(engine, PROMPTS, 3) == expected
    assert len(tried) == 1  # not at every step
    answers(engine, PROMPTS[:2], 3)
    assert (len(tried), len(graphs)) == (2, 1)
    monkeypatch.setattr(cuda_graphs, "BYTES_MAX", 1 << 10)  # what padding makes of it counts
    graphs.clear()
    assert answers(engine, PROMPTS, 3) == expected
    assert len(graphs) == 0


def test_what_a_predicate_masks_is_never_captured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked for each session, and a graph knows none."""
    make(tmp_path, "llama4_text")
    engine = engine_of(tmp_path)
    graphs = with_graphs(engine)
    with caplog.at_level(logging.WARNING, logger="node.model.execution.cuda_graphs"):
        assert answers(engine, PROMPTS[:2], 3) == answers(engine_of(tmp_path), PROMPTS[:2], 3)
    assert len(graphs) == 0
    assert not caplog.records


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_captured_steps_answer_as_on_the_cpu(family: str, tmp_path: Path) -> None:
    make(tmp_path, family)
    engine = engine_of(tmp_path, "cuda")
    graphs = engine.loaded.forward.graphs
    assert graphs is not None
    assert isinstance(graphs._capture, CudaCapture)
    assert answers(engine, PROMPTS, 6) == answers(engine_of(tmp_path), PROMPTS, 6)
    assert len(graphs) > 0
