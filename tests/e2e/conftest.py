"""Swarms of real processes, shared by the tests that only ask them things."""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from testing.forked import forked
from testing.local_swarm import LocalSwarm
from testing.paths import ROOT
from testing.reference import Reference, memory_for

MODEL = ROOT / "models" / "brook"


def start_swarm(shares: tuple[float, ...], model: Path = MODEL) -> LocalSwarm:
    """Peers that lend these parts of the whole model's memory; the caller stops the swarm."""
    whole_gib = memory_for(model) / 2**30
    swarm = LocalSwarm(model, extra=("--threads", "1"), start=forked)
    try:
        for share in shares:
            swarm.start_peer(memory_gib=share * whole_gib)
        swarm.wait_serving()
    except BaseException:
        swarm.stop()
        raise
    return swarm


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that share a swarm come last and together, so that none runs beside other tests."""

    def sharing(item: pytest.Item) -> int:
        return int(item.callspec.params.get("swarm", 0)) if hasattr(item, "callspec") else 0

    items.sort(key=sharing)


class Remembered(Reference):
    """Says again what it said before: many tests ask the same."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(model, tokenizer)
        self._greedy = cache(super().greedy)
        self._logits = cache(super().logits)

    def greedy(
        self, prompt_ids: Sequence[int], max_new_tokens: int, *, ignore_eos: bool = False
    ) -> tuple[list[int], float]:
        ids, took_s = self._greedy(tuple(prompt_ids), max_new_tokens, ignore_eos=ignore_eos)
        return list(ids), took_s

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        return self._logits(tuple(ids)).clone()


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Remembered.load(MODEL)


@pytest.fixture(scope="session", params=[3, 5])
def swarm(request: pytest.FixtureRequest) -> Iterator[LocalSwarm]:
    """3 or 5 peers of unequal memory; none can hold the model. For tests that only ask."""
    shares = {3: (0.62, 0.45, 0.36), 5: (0.36, 0.3, 0.3, 0.28, 0.26)}[request.param]
    started = start_swarm(shares)
    yield started
    started.stop()
