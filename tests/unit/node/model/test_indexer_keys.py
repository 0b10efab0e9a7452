"""Indexer keys of sparse attention are kept in pages: copied, taken back, and never half there."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dht.messages.session import Sampling
from node.engine.engine import Engine, WorkItem
from node.kv.export import KvBytes, pack_kv
from testing.tiny_families import LAYERS, SPARSE, make
from tests.unit.node.engines import loaded

PROMPT = tuple(n * 7 % 101 for n in range(1, 41))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("sparse")
    make(where, "deepseek_v32")
    return where


def engine_of(directory: Path) -> Engine:
    engine = loaded(directory, memory_bytes=16 << 20)
    assert engine.kv.reserve("s", 64) is None
    return engine


def run(engine: Engine, position: int, ids: tuple[int, ...]) -> int:
    item = WorkItem(
        session="s", start=0, end=LAYERS, position=position, token_ids=ids, sampling=Sampling()
    )
    [result] = engine.step([item])
    assert result.error is None, result.error
    assert result.token_id is not None
    return result.token_id


def test_a_session_goes_on_elsewhere_and_from_an_earlier_position(directory: Path) -> None:
    here, there = engine_of(directory), engine_of(directory)
    shape = here.layout.structure.kv_shapes[0]
    assert shape.indexer_width == SPARSE["index_head_dim"]
    assert here.spec.kv_bytes_per_token_layer == shape.numbers * 4, "they are charged"
    run(here, 0, PROMPT[:30])
    body = pack_kv(here.kv.take("s", 0, 30))
    assert len(body) == 30 * LAYERS * here.spec.kv_bytes_per_token_layer
    assert there.kv.put("s", KvBytes(start=0, end=LAYERS, position=0, tokens=30, body=body)) is None
    expected = run(here, 30, PROMPT[30:])
    assert run(there, 30, PROMPT[30:]) == expected
    run(there, 33, (5, 6, 7))  # drafts that are taken back
    assert run(there, 30, PROMPT[30:]) == expected


def test_keys_and_values_without_their_indexer_keys_are_refused(directory: Path) -> None:
    here, there = engine_of(directory), engine_of(directory)
    run(here, 0, PROMPT)
    rows = here.kv.take("s", 0, len(PROMPT))
    bare = replace(rows, layers=tuple(parts[:2] for parts in rows.layers))
    assert "2 parts of layer 0 came, 3 expected" in str(there.kv.put("s", bare))
    rows.layers[2][2][4] = torch.nan
    assert "indexer keys of layer 2 are not finite" in str(there.kv.put("s", rows))
    assert there.kv.put("s", here.kv.take("s", 0, len(PROMPT))) is None
