"""The engine of a stage: the model's own head beside its last layer, and the memory for it."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dht.errors import UserError
from dht.messages.session import Sampling
from dht.messages.types import DeviceSpec, stage_bytes
from node.device.hardware import Machine
from node.engine.engine import EngineConfig
from node.engine.work_item import WorkItem, WorkResult
from node.peer.own_figures import first_record
from node.stage.local_engine import LocalEngine
from node.weights.store import WeightStore
from testing.tiny_families import LAYERS, make
from tests.unit.node.engine.eagle import FEATURES, write_head
from tests.unit.node.engine.eagle import LAYERS as EAGLE_LAYERS
from tests.unit.node.engine.test_engine import prompt_of
from tests.unit.node.engine.test_head_drafts import Headed, written

LENT_BYTES = 32 << 20
MACHINE = Machine(
    device=DeviceSpec(kind="cpu", name="cpu", memory_bytes=1 << 30),
    torch_device="cpu",
    free_bytes=1 << 30,
    lend_bytes=LENT_BYTES,
)


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Headed:
    return written(tmp_path_factory.mktemp("headed"), "glm4_moe")


async def opened(
    headed: Headed,
    *,
    lent_bytes: int = LENT_BYTES,
    foretells: bool = True,
    head: Path | None = None,
    insists: bool = True,
) -> LocalEngine:
    return await LocalEngine.open(
        EngineConfig(
            store=WeightStore.open(str(headed.directory)), name="tiny", memory_bytes=lent_bytes
        ),
        profiles=headed.directory / "profiles",
        foretells=foretells,
        head=None if head is None else WeightStore.open(str(head)),
        insists=insists,
    )


async def held(engine: LocalEngine, start: int, end: int) -> bool:
    await engine.load(start, end, lambda *_: None)
    return engine.heads is not None and engine.heads.held


async def test_the_own_head_is_held_beside_the_last_layer_where_enough_kv_is_left(
    headed: Headed,
) -> None:
    engine = await opened(headed)
    assert not await held(engine, 0, 2)
    without = engine._engine.kv_tokens_beside(2, LAYERS)
    assert await held(engine, 2, LAYERS)
    assert engine.heads is not None
    alone_bytes, whole_bytes = (engine.heads.left_bytes(embeds=embeds) for embeds in (False, True))
    assert whole_bytes == alone_bytes - engine.spec.embed_bytes, "the embedding is shared"
    taken = stage_bytes(engine.spec, 2, LAYERS, engine.kv_tokens) + alone_bytes
    assert LENT_BYTES - (1 << 16) < taken <= LENT_BYTES
    assert engine.kv_tokens < without
    await engine.unload()
    assert not engine.heads.held
    engine.close()
    least = stage_bytes(engine.spec, 2, LAYERS, engine.kv_tokens_min) + alone_bytes
    for lent_bytes, holds in ((2 * alone_bytes + least, True), (least - 1, False)):
        engine = await opened(headed, lent_bytes=lent_bytes)
        assert await held(engine, 2, LAYERS) == holds
        engine.close()
    engine = await opened(headed, foretells=False)
    assert not await held(engine, 2, LAYERS)
    engine.close()


async def test_where_no_head_is_held_nothing_is_made_for_one_and_no_item_is_copied(
    headed: Headed,
) -> None:
    engine = await opened(headed)
    item = WorkItem(
        session="s", start=0, end=LAYERS, position=0, token_ids=prompt_of(9), foretells=True
    )
    assert await held(engine, 0, LAYERS)
    assert engine.heads is not None
    for drafted in (True, False):
        engine.open_kv("s", 40, (0, LAYERS), 40)
        assert engine.extend_kv("s", 40)
        (result,) = engine._engine.step([item])
        assert result.error is None
        assert (result.behind is not None) == drafted
        engine.free("s")
        engine.heads.unload()
    assert engine.submit == engine._worker.submit
    engine.close()


async def test_where_layers_keep_a_state_a_head_is_held_too(tmp_path: Path) -> None:
    model = written(tmp_path / "model", "qwen3_next")
    engine = await opened(model)
    assert engine.state_tokens
    assert await held(engine, 0, LAYERS)
    engine.close()


async def test_a_head_for_another_model_is_an_error_where_it_was_asked_for(
    headed: Headed, tmp_path: Path
) -> None:
    head = write_head(tmp_path, headed.directory)  # it looks in front of layers that lack here
    with pytest.raises(UserError, match="cannot draft for"):
        await opened(headed, head=head)
    engine = await opened(headed, head=head, insists=False)
    assert engine.heads is not None
    assert engine.heads.feature_layers == (), "the model's own"
    engine.close()


@pytest.mark.parametrize("name", ["llama", "llama, tied"])
@pytest.mark.parametrize("width", [None, 48], ids=["the model's embedding", "its own"])
async def test_an_eagle_head_is_held_beside_the_last_layer_and_says_where_it_looks(
    tmp_path: Path, name: str, width: int | None
) -> None:
    model = Headed(tmp_path / "model", name)
    make(model.directory, name, num_hidden_layers=EAGLE_LAYERS)
    head = write_head(tmp_path / "head", model.directory, width=width)
    engine = await opened(model, head=head)
    record = replace(first_record("p", engine, MACHINE), foretells=True)
    before = engine.refined(record)
    assert not before.foretells
    assert before.feature_layers == ()
    assert not await held(engine, 0, 3)
    for start in (3, 0):
        assert await held(engine, start, EAGLE_LAYERS)
        assert engine.heads is not None
        kept = stage_bytes(engine.spec, start, EAGLE_LAYERS, engine.kv_tokens)
        embeds = start == 0 or "tied" in name
        taken = kept + engine.heads.left_bytes(embeds=embeds)
        assert LENT_BYTES - (1 << 16) < taken <= LENT_BYTES
    after = engine.refined(record)
    assert after.foretells
    assert after.feature_layers == FEATURES
    alone, beside = (engine.heads.left_bytes(embeds=embeds) for embeds in (False, True))
    assert alone - beside == (engine.spec.embed_bytes if width is None else 0)
    assert engine.heads._entry is not None
    rows = engine.heads._entry(torch.tensor([1, 2]), torch.zeros(2, 3 * 32))
    assert rows.shape == (2, 2 * (width or 32))
    await engine.unload()
    assert not engine.refined(record).foretells
    engine.close()


@pytest.mark.parametrize("start", [0, 2])
async def test_what_the_own_head_foretells_comes_with_the_token(headed: Headed, start: int) -> None:
    engine = await opened(headed)
    came: asyncio.Queue[WorkResult] = asyncio.Queue()
    engine.start(lambda results: [came.put_nowait(result) for result in results])
    before = None if start == 0 else await opened(headed)
    hidden, ids = None, prompt_of(9)
    if before is not None:
        assert not await held(before, 0, start)
        before._engine.kv.reserve("s", 40)
        item = WorkItem(session="s", start=0, end=start, position=0, token_ids=ids)
        (result,) = before._engine.step([item])
        hidden = result.hidden
        before.close()
    assert await held(engine, start, LAYERS)
    for asks in (True, False):
        engine.open_kv("s", 40, (start, LAYERS), 40)
        assert engine.extend_kv("s", 40)
        engine.submit(
            WorkItem(
                session="s",
                start=start,
                end=LAYERS,
                position=0,
                token_ids=ids if start == 0 else None,
                hidden=hidden,
                sampling=Sampling(),
                foretells=asks,
            )
        )
        result = await came.get()
        assert result.error is None
        assert bool(result.foretold) == asks
        assert result.behind is None
        engine.free("s")
    assert engine.heads is not None
    assert not engine.heads._rows
    engine.close()


async def test_a_download_that_nobody_waits_for_any_more_ends() -> None:
    """It is in a thread, which would else go on for hours, one more each time."""
    began, ended, over = threading.Event(), threading.Event(), threading.Event()

    def fetch(start: int, end: int, report: Callable[[int, int], None]) -> None:
        began.set()
        try:
            while not over.wait(0.001):
                report(1, 2)
        finally:
            ended.set()

    engine = LocalEngine.__new__(LocalEngine)
    engine._engine = cast(Any, SimpleNamespace(loaded=SimpleNamespace(fetch=fetch)))
    engine.heads, engine._loop = None, asyncio.get_running_loop()
    waiting = asyncio.create_task(engine.fetch(0, 1, lambda *_: None))
    assert await asyncio.to_thread(began.wait, 60)
    waiting.cancel()
    try:
        assert await asyncio.to_thread(ended.wait, 60)
    finally:
        over.set()


async def test_a_load_that_nobody_waits_for_any_more_ends_and_frees_what_it_held(
    headed: Headed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner wants the memory, and a slow disk has gigabytes to read yet."""
    engine = await opened(headed)
    load, began, over = engine._engine.load, threading.Event(), threading.Event()

    def slow(start: int, end: int, report: Callable[[int, int], None], **named: Any) -> int:
        read_bytes = load(start, end, report, **named)
        began.set()
        while not over.wait(0.001):
            report(1, 2)
        return read_bytes

    monkeypatch.setattr(engine._engine, "load", slow)
    try:
        loading = asyncio.create_task(engine.load(0, LAYERS, lambda *_: None))
        assert await asyncio.to_thread(began.wait, 60)
        assert engine._engine.held == (0, LAYERS)
        loading.cancel()
        async with asyncio.timeout(60):
            await engine._worker.call(lambda: None)
        assert engine._engine.held == (0, 0)
        assert not engine._engine.loaded.layers
    finally:
        over.set()
        engine.close()
