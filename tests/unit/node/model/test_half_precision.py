"""Models in bfloat16, as GPUs run them: what a family's code casts, and where."""

from pathlib import Path

import pytest
import torch

from node.engine.engine import Engine
from node.engine.work_item import WorkItem, WorkResult
from testing.tiny_families import LAYERS, make
from tests.unit.node.engines import loaded
from tests.unit.node.model.test_families import NEW_TOKENS, Session, prompt_of, serve

FAMILIES = (
    "mamba",  # adds up in float32
    "falcon_h1",
    "qwen3_next",
    "lfm2",
    "gpt_oss",
    "bart",
    "llama",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_travel_in_the_dtype_that_peers_compute_in(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where sessions end at different layers of a stage, in one step."""
    make(tmp_path, family)
    engines = [
        loaded(tmp_path, 0, LAYERS - 1, dtype="bfloat16"),
        loaded(tmp_path, 1, LAYERS, dtype="bfloat16"),
    ]
    travelled: list[torch.dtype] = []
    step = Engine.step

    def noting(engine: Engine, items: list[WorkItem]) -> list[WorkResult]:
        results = step(engine, items)
        travelled.extend(r.hidden.dtype for r in results if r.hidden is not None)
        return results

    monkeypatch.setattr(Engine, "step", noting)
    sessions = [
        Session("early", prompt_of(9, seed=1), chunk=5, spans=[(0, 0, 1), (1, 1, LAYERS)]),
        Session("late", prompt_of(9), chunk=5, spans=[(0, 0, LAYERS - 1), (1, LAYERS - 1, LAYERS)]),
    ]
    serve(engines, sessions)
    assert all(len(session.answer) == NEW_TOKENS for session in sessions)
    assert set(travelled) == {torch.bfloat16}
