"""Beside llama.cpp: one file for both, the same work, and a reason where llama.cpp is missing."""

import sys
from pathlib import Path
from typing import Any

import pytest

from bench.results_table import render
from bench.speed import llama_cpp
from bench.speed.llama_cpp import COMPUTED_BY, MODELS, compare, ours, theirs, write_file
from bench.speed.real_sizes import STREAMS

OURS, THEIRS = COMPUTED_BY


def test_this_engine_runs_the_file_that_is_written(tmp_path: Path) -> None:
    figures = ours(write_file(MODELS["tiny"], "Q4_K", tmp_path))
    assert figures["prompt_512_s"] > 0
    assert {int(streams) for streams in figures["step_s"]} == set(STREAMS)


def test_both_take_turns_and_medians_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def child(by: str, file: Path) -> dict[str, Any]:
        asked.append(by)
        second = {OURS: 0.1, THEIRS: 0.2}[by] * (9 if len(asked) < 3 else 1)  # a slow first round
        return {"prompt_512_s": 4 * second, "step_s": {str(n): second for n in STREAMS}}

    monkeypatch.setattr(llama_cpp, "child", child)
    file = tmp_path / "some.gguf"
    file.write_bytes(bytes(1 << 20))
    found = compare(file, 3)
    assert asked == [OURS, THEIRS] * 3
    assert found[THEIRS]["prompt_tokens_per_s"] == 512 / 0.8
    assert found[OURS]["tokens_per_s"]["4"] == 40
    assert (found["prompt_of_llama_cpp"], found["decode_of_llama_cpp"]["8"]) == (2, 2)
    model = {"layers": 2, "of_layers": 4, "BF16": found}
    result = {"llama_cpp": "0.3", "cores": 2, "cpu": "some", "models": {"one": model}}
    assert "| one, 2 of 4 layers | BF16 | 1280 | 640 | 2.00 | 10.0, 40.0, 80.0 |" in (
        render("llama_cpp", {"llama_cpp": result}.__getitem__)
    )


def test_without_llama_cpp_its_row_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(ImportError):
        theirs(tmp_path / "some.gguf")
    missing = {"missing": "No module named 'llama_cpp'"}
    figures = {"prompt_512_s": 1.0, "step_s": {str(n): 1.0 for n in STREAMS}}
    monkeypatch.setattr(llama_cpp, "child", lambda by, _: missing if by == THEIRS else figures)
    file = tmp_path / "some.gguf"
    file.write_bytes(b"")
    found = compare(file, 1)
    assert found[THEIRS] == missing
    assert "prompt_of_llama_cpp" not in found
