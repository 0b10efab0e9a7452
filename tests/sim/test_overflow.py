"""Rows that overflow in float16 at a real stage: the answer ends at once, and says where."""

import asyncio
from pathlib import Path
from typing import ClassVar

import pytest
from safetensors.torch import load_file, save_file

from dht.errors import SwarmError
from dht.messages.session import OVERFLOWS
from node.engine.engine import Engine, EngineConfig
from node.weights.store import WeightStore
from testing.random_model import make_llama
from tests.sim.paper_swarm import LAYERS, PaperEngine, PaperSwarm
from tests.sim.test_own_head import RealEngine

pytestmark = pytest.mark.sim

WIDTH, VOCAB, LOUD = 64, 61, 5
PROMPT = tuple(range(1, 30))


class HalfEngine(RealEngine):
    """A real engine in float16, whose steps take a paper engine's time."""

    directory: ClassVar[Path]
    hidden = WIDTH

    def __init__(self, peer_id: str, start: int, end: int, *, kv_tokens: int, step_s: float):
        PaperEngine.__init__(self, peer_id, start, end, kv_tokens=kv_tokens, step_s=step_s)
        store = WeightStore.open(str(self.directory))
        config = EngineConfig(store=store, name="loud", memory_bytes=16 << 20, dtype="float16")
        self.engine = Engine(config)
        self.engine.load(start, end)
        self.kv_tokens = self.engine.kv.tokens
        self.heads = None


class HalfSwarm(PaperSwarm):
    engine_class = HalfEngine


@pytest.fixture(autouse=True)
def _model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose sixth layer makes numbers beyond float16, loaded as if it did not show."""
    make_llama(tmp_path, hidden=WIDTH, layers=LAYERS, vocab=VOCAB, context_tokens=128)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("mlp.down_proj", "mlp.up_proj"):
        tensors[f"model.layers.{LOUD}.{name}.weight"] *= 3000.0
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(HalfEngine, "directory", tmp_path, raising=False)
    monkeypatch.setattr(Engine, "_refuse_overflow", lambda _: None)


@pytest.mark.virtual(limit_s=600)
async def test_an_answer_that_overflows_ends_at_once_and_blames_that_stage_alone() -> None:
    swarm = HalfSwarm()
    try:
        peers = [await swarm.add(*span, wire_dtype="float16") for span in ((0, 3), (3, 6), (6, 8))]
        async with swarm.client(wait_s=60.0) as client:
            clock = asyncio.get_running_loop()
            began_s = clock.time()
            with pytest.raises(SwarmError, match=OVERFLOWS) as said:
                await client.generate(PROMPT, max_new_tokens=4)
            assert clock.time() - began_s < client.config.wait_s / 10
            assert f"layers [3, {LAYERS - 2})" in str(said.value)
            avoidance = client.view.avoidance
            avoided = [bool(avoidance.reason(p.peer_id, clock.time())) for p in peers]
            assert avoided == [False, True, False]
    finally:
        await swarm.close()
