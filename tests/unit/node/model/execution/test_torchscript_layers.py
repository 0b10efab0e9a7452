"""Recorded layers: what is recorded, that it is used, and that nothing outlives it."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from dht.messages.session import Sampling
from node.engine.engine import Engine, WorkItem
from node.model.execution import torchscript_layers
from node.model.linear import packed_linear
from testing.tiny_families import make
from tests.unit.node.engines import loaded

LAYERS = 4


def engine_of(directory: Path, dtype: str = "float32") -> Engine:
    return loaded(directory, dtype=dtype, memory_bytes=32 << 20)


def answers(engine: Engine, prompts: list[tuple[int, ...]], new: int) -> list[list[int]]:
    ids = list(prompts)
    at = [0] * len(prompts)
    out: list[list[int]] = [[] for _ in prompts]
    for n, prompt in enumerate(prompts):
        assert engine.kv.reserve(str(n), len(prompt) + new) is None
    for _ in range(new):
        items = [
            WorkItem(
                session=str(n), start=0, end=LAYERS, position=at[n], token_ids=ids[n],
                sampling=Sampling(),
            )
            for n in range(len(prompts))
        ]  # fmt: skip
        for n, result in enumerate(engine.step(items)):
            assert result.token_id is not None, result.error
            at[n] += len(ids[n])
            ids[n] = (result.token_id,)
            out[n].append(result.token_id)
    for n in range(len(prompts)):
        engine.kv.free(str(n))
    return out


PROMPTS = [(5, 6, 7), tuple(range(1, 30)), (9,)]


@pytest.mark.parametrize(
    ("family", "recorded"),
    [
        ("llama", 4), ("gemma2", 4), ("gpt2", 4), ("phi3, longrope", 4), ("llama, dynamic rope", 4),
        ("deepseek_v3", 1), ("qwen3_moe", 0), ("bloom", 0),
    ],
)  # fmt: skip
def test_what_does_not_look_at_numbers_is_recorded_and_answers_the_same(
    family: str, recorded: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, family)
    engine = engine_of(tmp_path)
    assert len(engine.loaded.forward.traced) == recorded
    monkeypatch.setattr(torchscript_layers.TorchScriptLayers, "add", lambda *_: None)
    plain = engine_of(tmp_path)
    assert len(plain.loaded.forward.traced) == 0
    assert answers(engine, PROMPTS, 6) == answers(plain, PROMPTS, 6)


def test_packed_layers_share_one_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "NUMBERS_LEAST", 1)
    make(tmp_path, "llama")
    recordings = engine_of(tmp_path).loaded.forward.traced
    assert len(recordings) == LAYERS
    assert len(recordings._programs) == 1


def test_decode_steps_run_what_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "llama")
    engine = engine_of(tmp_path)
    recordings = engine.loaded.forward.traced
    assert len(recordings._programs) == 1  # for all layers: TorchScript never forgets one
    monkeypatch.setattr(engine.loaded.forward, "_as_they_are", None)
    assert engine.kv.reserve("s", 8) is None
    item = WorkItem(session="s", start=1, end=3, position=0, hidden=torch.ones(1, 32))
    assert engine.step([item])[0].error is None
    monkeypatch.setattr(torchscript_layers, "ROWS_MAX", 0)
    item = WorkItem(session="s", start=1, end=3, position=1, hidden=torch.ones(1, 32))
    assert "NoneType" in (engine.step([item])[0].error or "")


def test_a_recording_that_differs_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "llama")
    monkeypatch.setattr(
        torchscript_layers, "_recorded", lambda function, _: lambda *given: 1.01 * function(*given)
    )
    monkeypatch.setattr(torchscript_layers.TorchScriptLayers, "_recorded_source", lambda *_: None)
    assert len(engine_of(tmp_path).loaded.forward.traced) == 0


def test_layers_that_scale_differently_are_recorded_apart(tmp_path: Path) -> None:
    model = make(tmp_path, "gpt2")
    model.config.scale_attn_by_inverse_layer_idx = True
    model.config.save_pretrained(tmp_path)
    recordings = engine_of(tmp_path).loaded.forward.traced
    assert len(recordings) == LAYERS
    assert len(recordings._programs) == LAYERS


def test_without_torchscript_layers_run_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "llama")
    expected = answers(engine_of(tmp_path), PROMPTS, 3)

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no TorchScript here")

    monkeypatch.setattr(torch.jit, "trace", refuse)
    engine = engine_of(tmp_path)
    assert len(engine.loaded.forward.traced) == 0
    assert answers(engine, PROMPTS, 3) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_precisions_are_recorded_too(dtype: str, tmp_path: Path) -> None:
    make(tmp_path, "llama")
    assert len(engine_of(tmp_path, dtype).loaded.forward.traced) == LAYERS


def test_layers_that_leave_take_their_weights_along(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    engine = engine_of(tmp_path)
    held = [weakref.ref(w) for w in engine.loaded.layers[0].parameters()]
    engine.load(1, 3)
    gc.collect()
    assert not [tensor for tensor in held if tensor() is not None]
    assert len(engine.loaded.forward.traced) == 2
