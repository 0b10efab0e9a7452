"""Single rows of several sessions that have states run together, with the same results."""

from pathlib import Path

import pytest
import torch

from node.model.execution.forward import LayerForward
from testing.tiny_families import LAYERS, make
from tests.unit.node.model.test_families import (
    NEW_TOKENS,
    Session,
    engine_of,
    greedy,
    prompt_of,
    serve,
)

LENGTHS = (3, 13, 40, 71)


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "lfm2", "mamba"])
def test_rows_of_sessions_of_any_length_share_a_pass(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(tmp_path, name)
    engines = [engine_of(tmp_path, 0, 2), engine_of(tmp_path, 2, LAYERS)]
    assert all(engine.loaded.forward.stacks for engine in engines)
    together: list[int] = []
    stacked = LayerForward._stacked

    def counting(self: LayerForward, *given: object) -> torch.Tensor:
        together.append(len(given[3]))  # type: ignore[arg-type]
        return stacked(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(LayerForward, "_stacked", counting)
    sessions = [
        Session(
            name=str(tokens),
            prompt=prompt_of(tokens, seed=tokens),
            chunk=33,
            spans=[(0, 0, 2), (1, 2, LAYERS)],
        )
        for tokens in LENGTHS
    ]
    serve(engines, sessions)
    for session in sessions:
        assert session.answer == greedy(model, session.prompt, NEW_TOKENS), session.name
    assert max(together) == len(LENGTHS)


def test_a_model_that_keeps_no_state_is_not_stacked(tmp_path: Path) -> None:
    make(tmp_path, "bloom")
    assert not engine_of(tmp_path, 0, 1).loaded.forward.stacks
