"""A device that has too little memory, or fails: refused at load, survived in a step, or told."""

import asyncio
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dht.errors import MachineError
from node.engine.batch_rows import StepRows
from node.engine.engine import DeviceLostError, WorkItem
from node.engine.work_item import WorkResult
from node.profiling.layer_fit import Timing
from node.profiling.layer_rates import Profile
from node.stage.local_engine import LocalEngine
from testing.random_model import make_llama
from tests.unit.node.engines import loaded

LAYERS = 4
NO_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB. See documentation"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(
        tmp_path_factory.mktemp("device"), hidden=64, layers=LAYERS, vocab=64, context_tokens=64
    )


engine_of = partial(loaded, memory_bytes=8 << 20)


def items(sessions: str) -> list[WorkItem]:
    return [WorkItem(session=s, start=0, end=LAYERS, position=0, token_ids=(1,)) for s in sessions]


def test_what_leaves_is_gone_before_anything_comes(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sets of pages, or of embeddings, do not fit a GPU."""
    engine = engine_of(directory)
    for session in "ab":  # so that steps have been run over what leaves
        assert engine.kv.reserve(session, 16) is None
    engine.step(items("ab"))
    leaving = [weakref.ref(pool.keys) for pool in engine._pools.values()]
    leaving += [weakref.ref(part.weight) for part in engine.loaded.parts.values()]  # type: ignore[arg-type]
    alive: list[int] = []
    fill = engine.loaded._fill

    def filling(*given: Any) -> torch.nn.Module:
        alive.append(sum(ref() is not None for ref in leaving))
        return fill(*given)

    monkeypatch.setattr(engine.loaded, "_fill", filling)
    engine.loaded.layers = {}  # so that there is something to fill
    engine.load(1, 2)
    assert alive == [0]


def test_a_load_that_does_not_fit_is_a_refusal_that_leaves_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(directory)
    pool = engine._pool
    refs: list[weakref.ref[torch.Tensor]] = []

    def grudging(pages: int, layer: int) -> Any:
        if layer == 2:
            raise torch.OutOfMemoryError(NO_MEMORY)
        made = pool(pages, layer)
        refs.append(weakref.ref(made.keys))
        return made

    monkeypatch.setattr(engine, "_pool", grudging)
    with pytest.raises(MachineError, match=r"ran out of memory with layers 0-3 of .*--memory"):
        engine.load(0, LAYERS)
    assert [ref() for ref in refs] == [None, None]
    assert not engine.loaded.layers
    assert engine.held == (0, 0)
    assert engine.step(items("a"))[0].error is not None
    engine.load(0, 2)
    assert engine.held == (0, 2)


def test_where_a_step_does_not_fit_its_halves_have_its_memory(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(directory)
    run = engine._steps.run
    held: list[weakref.ref[torch.Tensor]] = []
    sizes: list[int] = []

    def short(rows: list[StepRows]) -> list[WorkResult]:
        assert all(ref() is None for ref in held)
        sizes.append(len(rows))
        if len(rows) > 1:
            intermediate = torch.zeros(3)
            held.append(weakref.ref(intermediate))
            raise torch.OutOfMemoryError(NO_MEMORY)
        return run(rows)

    monkeypatch.setattr(engine._steps, "run", short)
    for session in "abcd":
        assert engine.kv.reserve(session, 16) is None
    assert [result.error for result in engine.step(items("abcd"))] == [None] * 4
    assert sizes == [4, 2, 1, 1, 2, 1, 1]


@pytest.mark.parametrize("lost", [True, False])
def test_a_device_that_fails_for_good_is_no_sessions_fault(
    lost: bool, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(directory)

    def fails(*_: Any, **__: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure\nmore")

    monkeypatch.setattr(engine._steps, "run", fails)
    for session in "ab":
        assert engine.kv.reserve(session, 16) is None
    if not lost:  # what was wrong is over: others are served
        errors = [result.error or "" for result in engine.step(items("ab"))]
        assert all("unspecified launch failure" in error for error in errors)
        return
    monkeypatch.setattr(torch, "ones", fails)
    with pytest.raises(DeviceLostError, match="unspecified launch failure more"):
        engine.step(items("ab"))


def test_the_peer_is_told_of_a_lost_device(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(directory)
    timing = Timing(batch=1, context_tokens=1, seconds=0.001)
    profile = Profile(points=(timing,), checks=(), prefills=(timing,), kv_tokens=64)
    told: list[str] = []

    def fails(*_: Any, **__: Any) -> Any:
        raise DeviceLostError("it is gone")

    monkeypatch.setattr(engine, "load", fails)

    async def scenario() -> None:
        stage = LocalEngine(engine, profile)
        try:
            with pytest.raises(DeviceLostError):
                await stage.load(0, 1, lambda *_: None)
            told.append(await stage.lost)
        finally:
            stage.close()

    asyncio.run(scenario())
    assert told == ["it is gone"]
