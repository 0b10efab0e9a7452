"""Models in bfloat16, as GPUs run them: what a family's code casts, and where."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from node.engine.engine import Engine
from node.engine.work_item import WorkItem, WorkResult
from node.model.inspection.meta_model import auto_class
from testing.tiny_families import FAMILIES, LAYERS, make
from tests.unit.node.engines import loaded
from tests.unit.node.model.test_families import (
    NEW_TOKENS,
    Session,
    listen,
    prompt_of,
    rows_of,
    serve,
)

CASTING = (
    "mamba",  # adds up in float32
    "falcon_h1",
    "qwen3_next",
    "lfm2",
    "gpt_oss",
    "bart",
    "llama",
)


@pytest.mark.parametrize("family", CASTING)
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


@pytest.mark.parametrize("name", list(FAMILIES))
def test_errors_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Of a usual row: in mixtures of experts some rows go to other experts, there as here."""
    model = make(tmp_path, name)
    engine = loaded(tmp_path, dtype="bfloat16")
    logits: list[torch.Tensor] = []
    listen(engine, logits)
    sessions = [
        Session(str(tokens), prompt_of(tokens, seed=tokens), 13, [(0, 0, engine.spec.layers)])
        for tokens in (12, 31, 58)
    ]
    serve([engine], sessions)
    drawn = torch.cat(logits).float()
    known = torch.cat([rows_of(model, s.prompt, s.answer) for s in sessions])
    half = auto_class(model.config).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    own = torch.cat([rows_of(half, s.prompt, s.answer) for s in sessions]).float()
    error = (drawn[:, None] - known).abs().mean(-1).amin(-1).median()
    assert error < 1.5 * (own - known).abs().mean(-1).median()


def remembering(directory: Path, family: str) -> None:
    """Write a model whose states last for dozens of tokens, as those of trained ones do, and say
    little in the output of a layer behind the first rows."""
    make(directory, family)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("A_log", "dt_proj.weight")):
            tensor.mul_(0.1)
        if name.endswith("dt_proj.bias"):
            tensor.fill_(-3.5)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_later_parts_of_a_prompt_go_on_from_the_states_before(dtype: str, tmp_path: Path) -> None:
    """Mamba's code forgets them where rows run together."""
    remembering(tmp_path, "mamba")
    as_float32, as_peers = (
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=known).eval()
        for known in (torch.float32, getattr(torch, dtype))
    )
    engine = loaded(tmp_path, dtype=dtype)
    logits: list[torch.Tensor] = []
    listen(engine, logits)
    session = Session("a", prompt_of(71), chunk=7, spans=[(0, 0, LAYERS)])
    serve([engine], [session])
    known = rows_of(as_float32, session.prompt, session.answer)
    own = (rows_of(as_peers, session.prompt, session.answer) - known).abs().max()
    assert (torch.cat(logits) - known).abs().max() < 2 * own + 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("family", "forgets"),
    [("mamba", True), ("falcon_h1", False), ("qwen3_next", False), ("lfm2", False)],
)
def test_rows_run_alone_only_where_the_code_forgets_states(
    family: str, forgets: bool, dtype: str, tmp_path: Path
) -> None:
    """However little a state says in the layer's output."""
    make(tmp_path, family)
    path = tmp_path / "model.safetensors"
    small = {
        name: tensor * (0.1 if tensor.dim() > 1 else 1) for name, tensor in load_file(path).items()
    }
    save_file(small, path, metadata={"format": "pt"})
    assert loaded(tmp_path, dtype=dtype).loaded.forward.row_by_row is forgets
