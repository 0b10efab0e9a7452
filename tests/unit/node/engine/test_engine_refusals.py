"""What comes in wrong is refused by name, and other sessions do not notice."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dht.errors import UserError
from dht.messages.session import OVERFLOWS, Sampling
from node.engine.engine import Engine, EngineConfig, WorkItem
from node.weights.store import WeightStore
from testing.random_model import make_llama
from tests.unit.node.engines import loaded

LAYERS, VOCAB, WIDTH = 3, 61, 64
GREEDY = Sampling()
IDS = tuple(n * 7 % VOCAB for n in range(1, 24))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("refusals")
    return make_llama(where, hidden=WIDTH, layers=LAYERS, vocab=VOCAB, context_tokens=128)


engine_of = partial(loaded, memory_bytes=16 << 20)


def whole(session: str, position: int, ids: tuple[int, ...]) -> WorkItem:
    return WorkItem(
        session=session, start=0, end=LAYERS, position=position, token_ids=ids, sampling=GREEDY
    )


def test_a_session_beyond_the_pool_is_told_how_much_is_free(directory: Path) -> None:
    engine = engine_of(directory)
    free = engine.kv.free_tokens
    assert engine.kv.reserve("half", free // 2) is None
    left = engine.kv.free_tokens
    assert engine.kv.reserve("more", left + 1) == f"{left + 1} tokens of KV asked, {left} are free"
    engine.kv.free("half")
    assert engine.kv.free_tokens == free


@pytest.mark.parametrize(
    ("item", "told"),
    [
        (whole("bad", 0, (1, VOCAB)), f"token id {VOCAB} of a vocabulary of {VOCAB}"),
        (whole("bad", 0, (-1, 2)), "token id -1"),
        (whole("bad", 3, (1,)), "position 3 asked, 0 comes next"),
        (WorkItem(session="bad", start=0, end=1, position=0, hidden=torch.zeros(2, WIDTH + 1)),
         rf"shape \(2, {WIDTH + 1}\), \(2, {WIDTH}\) expected"),
        (WorkItem(session="bad", start=0, end=1, position=0, hidden=torch.zeros(2, 2, WIDTH)),
         rf"shape \(2, 2, {WIDTH}\)"),
        (WorkItem(session="bad", start=0, end=1, position=0,
                  hidden=torch.zeros(2, WIDTH, dtype=torch.int64)), "int64"),
        (WorkItem(session="bad", start=1, end=2, position=0,
                  hidden=torch.full((2, WIDTH), math.nan)),
         r"not finite came in for layers \[1, 2\)"),
        (WorkItem(session="bad", start=1, end=2, position=0,
                  hidden=torch.full((1, WIDTH), -math.inf)), "not finite came in"),
    ],
)  # fmt: skip
def test_a_bad_item_is_named_and_its_neighbour_answers(
    directory: Path, item: WorkItem, told: str
) -> None:
    engine = engine_of(directory)
    for name in ("good", "bad"):
        assert engine.kv.reserve(name, 64) is None
    alone = engine_of(directory)
    alone.kv.reserve("good", 64)
    expected = alone.step([whole("good", 0, IDS)])[0].token_id
    bad, good = engine.step([item, whole("good", 0, IDS)])
    assert good.error is None
    assert good.token_id == expected
    with pytest.raises(AssertionError, match=told):
        raise AssertionError(bad.error)
    if item.end == LAYERS:  # the session stands where it stood, and may go on
        assert engine.step([whole("bad", 0, IDS)])[0].token_id == expected


def test_chunks_come_in_order_and_a_session_may_go_back(directory: Path) -> None:
    """As over a mended route: what comes again is run again, and what was behind it is gone."""
    engine = engine_of(directory)
    engine.kv.reserve("s", 64)
    assert engine.step([whole("s", 0, IDS)])[0].error is None
    assert engine.step([whole("s", 7, IDS[7:10])])[0].error is None
    gone = engine.step([whole("s", 12, IDS[12:])])[0].error
    assert gone == "position 12 asked, 10 comes next"
    skipping = engine.step([whole("s", 11, IDS[11:])])[0].error
    assert skipping == "position 11 asked, 10 comes next"
    other = WorkItem(session="s", start=1, end=2, position=10, hidden=torch.zeros(1, WIDTH))
    assert "the session runs layers [0, 3]" in str(engine.step([other])[0].error)
    alone = engine_of(directory)
    alone.kv.reserve("s", 64)
    expected = alone.step([whole("s", 0, IDS)])[0].token_id
    assert engine.step([whole("s", 10, IDS[10:])])[0].token_id == expected


@pytest.mark.parametrize("sessions", [1, 2, 5])
def test_what_raises_takes_nobody_with_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch, sessions: int
) -> None:
    engine = engine_of(directory)
    names = [f"good-{n}" for n in range(sessions)]
    for name in ("bad", *names):
        assert engine.kv.reserve(name, 64) is None
    run: Any = engine._steps.run

    def breaks(rows: list[Any]) -> Any:
        if any(row.item.session == "bad" for row in rows):
            raise RuntimeError("a kernel broke")
        return run(rows)

    monkeypatch.setattr(engine._steps, "run", breaks)
    items = [whole("bad", 0, IDS), *(whole(name, 0, IDS[: 3 + n]) for n, name in enumerate(names))]
    bad, *good = engine.step(items)
    assert bad.error == f"layers [0, {LAYERS}) failed: a kernel broke"
    assert [result.error for result in good] == [None] * sessions
    monkeypatch.undo()
    alone = engine_of(directory)
    for n, (name, result) in enumerate(zip(names, good, strict=True)):
        alone.kv.reserve(name, 64)
        assert alone.step([whole(name, 0, IDS[: 3 + n])])[0].token_id == result.token_id


def test_layers_that_make_no_number_are_named(directory: Path) -> None:
    engine = engine_of(directory)
    for name in ("bad", "good"):
        engine.kv.reserve(name, 8)
    for parameter in engine.loaded.layers[1].parameters():
        parameter.fill_(math.nan)
    bad, good = engine.step(
        [
            WorkItem(session=name, start=at, end=at + 1, position=0, hidden=torch.ones(2, WIDTH))
            for name, at in (("bad", 1), ("good", 2))
        ]
    )
    assert bad.error == "layers [1, 2) made hidden states that are not finite"
    assert good.error is None


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose second layer makes numbers beyond float16 of any rows."""
    where = tmp_path_factory.mktemp("loud")
    make_llama(where, hidden=WIDTH, layers=LAYERS, vocab=VOCAB, context_tokens=128)
    tensors = load_file(where / "model.safetensors")
    for name in ("mlp.down_proj", "mlp.up_proj"):
        tensors[f"model.layers.1.{name}.weight"] *= 3000.0
    save_file(tensors, where / "model.safetensors", metadata={"format": "pt"})
    return where


def in_dtype(directory: Path, dtype: str) -> Engine:
    store = WeightStore.open(str(directory))
    return Engine(EngineConfig(store=store, name="loud", memory_bytes=16 << 20, dtype=dtype))


@pytest.mark.parametrize("held", [(0, LAYERS), (1, 2)])
def test_a_model_that_overflows_in_float16_is_refused_at_load(
    loud: Path, held: tuple[int, int]
) -> None:
    engine = in_dtype(loud, "float16")
    with pytest.raises(UserError, match="loud overflows in float16, use bfloat16"):
        engine.load(*held)
    assert engine.held == (0, 0)
    engine.load(2, 3)  # that layer does not
    in_dtype(loud, "bfloat16").load(*held)


def test_who_overflows_says_so_of_itself(loud: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the stage before it, whose rows were sound."""
    monkeypatch.setattr(Engine, "_refuse_overflow", lambda _: None)
    engine = in_dtype(loud, "float16")
    engine.load(1, 2)
    assert engine.kv.reserve("s", 8) is None
    rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    [result] = engine.step([WorkItem(session="s", start=1, end=2, position=0, hidden=rows)])
    assert OVERFLOWS in (result.error or "")
    assert "layers [1, 2)" in (result.error or "")
    assert not result.unsound_input
