"""The engine of a stage: the model's own head beside its last layer, and the memory for it."""

import asyncio
from pathlib import Path

import pytest

from bench.tiny_families import LAYERS
from dht.messages.session import Sampling
from dht.messages.types import stage_bytes
from node.engine.work_item import WorkItem, WorkResult
from node.stage.local_engine import LocalEngine
from node.weights.store import WeightStore
from tests.unit.node.engine.test_engine import prompt_of
from tests.unit.node.engine.test_head_drafts import Headed, written

LENT_BYTES = 32 << 20


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Headed:
    return written(tmp_path_factory.mktemp("headed"), "glm4_moe")


async def opened(
    headed: Headed, *, lent_bytes: int = LENT_BYTES, foretells: bool = True
) -> LocalEngine:
    return await LocalEngine.open(
        WeightStore.open(str(headed.directory)),
        name="tiny",
        torch_device="cpu",
        dtype="float32",
        memory_bytes=lent_bytes,
        threads=None,
        profiles=headed.directory / "profiles",
        foretells=foretells,
    )


async def held(engine: LocalEngine, start: int, end: int) -> bool:
    await engine.load(start, end, lambda *_: None)
    return engine.heads is not None and engine.heads.held


def test_the_own_head_is_held_beside_the_last_layer_where_enough_kv_is_left(headed: Headed) -> None:
    async def scenario() -> None:
        engine = await opened(headed)
        assert not await held(engine, 0, 2)
        without = engine._engine.kv_tokens_beside(2, LAYERS)
        assert await held(engine, 2, LAYERS)
        assert engine.heads is not None
        alone_bytes, whole_bytes = engine.heads.left_bytes(2), engine.heads.left_bytes(0)
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

    asyncio.run(scenario())


def test_where_no_head_is_held_nothing_is_made_for_one_and_no_item_is_copied(
    headed: Headed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
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
        queued: list[WorkItem] = []
        monkeypatch.setattr(engine._worker, "submit", queued.append)
        engine.submit(item)
        assert queued[0] is item
        engine.close()

    asyncio.run(scenario())


def test_where_layers_keep_a_state_no_head_is_held(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = await opened(written(tmp_path, "qwen3_next"))
        assert engine.state_tokens
        assert not await held(engine, 0, LAYERS)
        engine.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("start", [0, 2])
def test_what_the_own_head_foretells_comes_with_the_token(headed: Headed, start: int) -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())
