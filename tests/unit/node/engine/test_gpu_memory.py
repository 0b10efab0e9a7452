"""Too little memory on a GPU ends a load or one item of a step, and nothing else."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dht.errors import MachineError
from node.engine.engine import Engine, EngineConfig, WorkItem
from node.weights.store import WeightStore
from testing.random_model import make_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
CONTEXT = 16384


@pytest.fixture
def _whole_card() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def leave(more_bytes: int) -> None:
    """Let this process take so much more memory than it has, whatever others take."""
    torch.cuda.empty_cache()
    there = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more_bytes) / there)


def engine_of(directory: Path, memory_bytes: int) -> Engine:
    make_llama(directory, hidden=2048, layers=1, vocab=64, context_tokens=CONTEXT)
    store = WeightStore.open(str(directory))
    return Engine(
        EngineConfig(
            store=store, name="m", device="cuda", dtype="bfloat16", memory_bytes=memory_bytes
        )
    )


@pytest.mark.usefixtures("_whole_card")
def test_a_load_without_memory_can_be_tried_again(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, 1 << 30)
    leave(256 << 20)
    with pytest.raises(MachineError, match="ran out of memory"):
        engine.load(0, 1)
    torch.cuda.set_per_process_memory_fraction(1.0)
    engine.load(0, 1)
    assert engine.held == (0, 1)


@pytest.mark.usefixtures("_whole_card")
def test_a_step_without_memory_costs_the_item_that_needs_it(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, 1 << 30)
    engine.load(0, 1)
    for name, tokens in (("small", 4), ("large", CONTEXT)):
        assert engine.kv.reserve(name, tokens) is None
    small = WorkItem(session="small", start=0, end=1, position=0, token_ids=(1, 2))
    large = WorkItem(session="large", start=0, end=1, position=0, token_ids=(1,) * CONTEXT)
    leave(24 << 20)
    told = [result.error for result in engine.step([small, large])]
    assert told[0] is None
    assert "out of memory" in (told[1] or "")
    torch.cuda.set_per_process_memory_fraction(1.0)
    more = WorkItem(session="small", start=0, end=1, position=2, token_ids=(3,))
    assert [result.error for result in engine.step([more, large])] == [None, None]
