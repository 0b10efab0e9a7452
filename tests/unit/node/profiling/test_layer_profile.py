"""What the profile says, by law and from the command."""

import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dht.command_line import EXIT_DONE, EXIT_USER
from node import profile
from node.engine.engine import Engine, EngineConfig
from node.kv.session_state import SessionState
from node.model.execution.forward import LayerForward
from node.profiling import layer_profile
from node.profiling.layer_profile import (
    CHECKS,
    PROFILING,
    EngineLayer,
    feasible,
    layers_to_time,
    measure,
    points_within,
    room_for_timing,
    tokens_per_s,
)
from node.profiling.layer_rates import BATCHES, CHUNK_CONTEXTS, CHUNKS, CONTEXTS
from node.weights.store import WeightStore
from testing.random_model import make_llama
from testing.tiny_families import make
from tests.unit.node.engines import opened

LAYERS = 6


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(
        tmp_path_factory.mktemp("profile"), hidden=64, layers=LAYERS, vocab=64, context_tokens=64
    )


def engine_of(directory: Path, memory_bytes: int = 64 << 20) -> Engine:
    return opened(directory, memory_bytes=memory_bytes)


@pytest.mark.parametrize("memory_bytes", [400_000, 800_000, 64 << 20])
def test_more_layers_are_slower_and_all_that_fit_are_listed(
    directory: Path, memory_bytes: int
) -> None:
    engine = engine_of(directory, memory_bytes)
    rates = tokens_per_s(engine, measure(engine))
    assert len(rates) == engine.layers_max
    assert all(a > b > 0 for a, b in itertools.pairwise(rates))
    assert engine.kv.free_tokens >= engine.kv_tokens_min  # no session of the profile is left


def test_one_quiet_moment_is_enough(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings are the least of several: a slow machine with one fast step counts as fast."""
    longer = replace(layer_profile.PROFILING, timing_budget_s=1.0)
    monkeypatch.setattr(layer_profile, "PROFILING", longer)
    now, calls = 0.0, 0

    def clock() -> float:
        nonlocal now, calls
        calls += 1
        now += 0.001 if calls % 5 == 0 else 0.004
        return now

    measured = measure(engine_of(directory), clock)
    assert {timing.batch for timing in measured.points} == set(BATCHES)
    timed = (*measured.points, *measured.checks)
    assert all(timing.seconds == pytest.approx(0.001) for timing in timed)
    assert measured.fit_error == pytest.approx(0)


def test_points_are_those_that_the_context_and_the_pages_allow() -> None:
    grid = {(b, c) for b in BATCHES for c in CONTEXTS} | set(CHECKS)
    everything = {(b, c) for b, c in grid if b * c <= PROFILING.point_tokens_max}
    assert set(points_within(1 << 20, 16, 1 << 20)) == everything
    assert max(everything) == (256, 1)
    assert set(points_within(1 << 20, 16, 512)) == {p for p in everything if p[1] <= 512}
    assert points_within(64, 16, 4096) == ((1, 1), (4, 1))
    assert points_within(0, 16, 4096) == ((1, 1),)


def test_a_real_engine_is_timed_at_every_point_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = replace(layer_profile.BATCHING, decode_s_max=math.inf)  # a busy machine stalls
    monkeypatch.setattr(layer_profile, "BATCHING", patient)
    directory = make_llama(tmp_path, hidden=64, layers=3, vocab=64, context_tokens=1536)
    engine = engine_of(directory)
    measured = measure(engine)
    timed = {(t.batch, t.context_tokens) for t in (*measured.points, *measured.checks)}
    assert timed == set(feasible(engine, room_for_timing(engine)))
    assert timed >= {(1, 512), (16, 512), (4, 1024), (256, 1)}
    chunks = [(timing.batch, timing.context_tokens) for timing in measured.prefills]
    assert chunks == [(chunk, before) for before in CHUNK_CONTEXTS for chunk in CHUNKS]
    assert measured.fit_error is not None
    assert measured.fit_error >= 0
    start, end = engine.held
    assert engine.kv.free_tokens == engine.kv_tokens_beside(start, end)
    assert set(measured.layer_s()) == {1, 4, 16, *CHUNKS}
    assert set(measured.decode_s()) >= {1, 4, 16}
    for times, rows in ((measured.decode_times, BATCHES), (measured.prompt_times, CHUNKS)):
        assert tuple(count for count, _, _ in times) == rows
        assert all(0 < near_ns <= far_ns for _, near_ns, far_ns in times)


def test_what_a_step_does_beside_its_layers_is_no_layers_time(directory: Path) -> None:
    now = 0.0

    def clock() -> float:
        return now

    engine = engine_of(directory)
    step = engine.step

    def slow(items):  # type: ignore[no-untyped-def]
        nonlocal now
        now += 1.0
        return step(items)

    engine.step = slow  # type: ignore[method-assign]
    measured = measure(engine, clock)
    assert {timing.seconds for timing in (*measured.points, *measured.prefills)} == {0.0}


def test_steps_that_take_long_end_the_measurement(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that needs 60 ms for four rows is not asked for 256 of them."""
    now, rows = 0.0, 0

    def clock() -> float:
        return now

    engine = engine_of(directory)
    as_it_is = LayerForward.run

    def slow(flow, start, end, step, hidden, positions):  # type: ignore[no-untyped-def]
        nonlocal now, rows
        rows = max(rows, len(hidden))
        now += 0.015 * len(hidden)
        return as_it_is(flow, start, end, step, hidden, positions)

    monkeypatch.setattr(LayerForward, "run", slow)
    measured = measure(engine, clock)
    assert rows == CHUNKS[0]
    assert {timing.batch for timing in measured.points} == {1, 4}
    assert {timing.batch for timing in measured.prefills} == {CHUNKS[0]}


def test_the_command_prints_one_object(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["profile", str(directory), "--cpu", "--memory", "0.05"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--json"])
    assert profile.run() == EXIT_DONE
    told = json.loads(capsys.readouterr().out)
    assert len(told["tokens_per_s"]) == told["layers_max"] == LAYERS
    assert {point["batch"] for point in told["points"]} == set(BATCHES)
    assert told["fit_error"] >= 0
    monkeypatch.setattr(sys, "argv", arguments)
    assert profile.run() == EXIT_DONE
    assert "6 layers:" in capsys.readouterr().out


def test_the_command_names_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["profile", str(tmp_path / "nowhere")])
    assert profile.run() == EXIT_USER
    assert capsys.readouterr().err.startswith("error: ")


def test_a_layer_of_each_kind_is_timed_and_counts_by_how_many_there_are(tmp_path: Path) -> None:
    make(tmp_path, "deepseek_v3", num_hidden_layers=9, first_k_dense_replace=3)
    store = WeightStore.open(str(tmp_path))
    engine = Engine(EngineConfig(store=store, name="tiny", memory_bytes=64 << 20))
    assert layers_to_time(engine) == {3: 5, 1: 2}  # neither the first layer nor the last
    now = 0.0

    def clock() -> float:
        nonlocal now
        start, _ = engine.held
        now += 0.0004 if start == 3 else 0.0001
        return now

    measured = measure(engine, clock)
    mean_s = (5 * 0.0004 + 2 * 0.0001) / 7
    timed = (*measured.points, *measured.prefills)
    assert all(timing.seconds == pytest.approx(mean_s) for timing in timed)
    assert len(measured.points) > 1
    assert len(measured.prefills) > 1


def test_a_busy_moment_of_a_gpu_makes_no_layer_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run takes beside its layer is subtracted, but not what it took while others computed:
    a layer of 200 µs in runs of 250."""
    monkeypatch.setattr(layer_profile, "wait_for", lambda _: None)
    now_s, empties = 0.0, 0

    def run(start: int, end: int, *_: Any) -> torch.Tensor:
        nonlocal now_s, empties
        empties += start == end
        slow = start == end and empties <= 5
        now_s += 250e-6 if start < end or slow else 50e-6
        return torch.empty(0)

    structure = SimpleNamespace(packed=True)
    engine: Any = SimpleNamespace(
        spec=SimpleNamespace(context_tokens=64),
        config=SimpleNamespace(page_tokens=16),
        device=torch.device("cuda"),
        layout=SimpleNamespace(structure=structure),
        kv_tokens_beside=lambda *_: 64,
        load=lambda *_, **__: 0,
    )
    layer = EngineLayer(engine, 0, lambda: now_s)
    taken = []
    for _ in range(4):
        layer._layers_s = 0.0
        layer._timed(run, 0, 1, None, torch.empty(16, 8))
        taken.append(layer._layers_s)
    assert taken == pytest.approx([200e-6] * 4)


@pytest.mark.parametrize("family", ["mamba", "lfm2", "falcon_h1"])
def test_a_layer_that_keeps_a_state_is_timed_in_long_contexts(family: str, tmp_path: Path) -> None:
    make(tmp_path, family)
    engine = engine_of(tmp_path)
    layer = EngineLayer(engine, 1, clock=itertools.count().__next__)
    with layer.sessions(2, 100) as step_s:
        assert step_s(2) > 0
        assert step_s(1) > 0
    assert layer.chunk_s(100, 4) > 0
    assert engine.kv.free_tokens == engine.kv.tokens


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each state that begins at a first token, which may run a slow kernel."""
    seen: list[int] = []
    made, begins = SessionState.__init__, SessionState.begin

    def new(self: SessionState, states_per_layer: int) -> None:
        made(self, states_per_layer)
        seen.append(0)

    def begin(self: SessionState, position: int) -> None:
        seen.extend([0] * (position == 0))
        begins(self, position)

    monkeypatch.setattr(SessionState, "__init__", new)
    monkeypatch.setattr(SessionState, "begin", begin)
    return seen


@pytest.mark.parametrize("family", ["mamba", "falcon_h1"])
def test_a_first_token_runs_a_few_times_at_load_and_once_for_all_timed_sessions(
    family: str, tmp_path: Path, begun: list[int]
) -> None:
    make(tmp_path, family)
    engine = engine_of(tmp_path)
    begun.clear()  # its structure was looked at without numbers
    layer = EngineLayer(engine, 1, clock=itertools.count().__next__)
    assert len(begun) <= 9, "trials of one row, of rows apart, of large states and of two sessions"
    for context in (1, 100):
        begun.clear()
        with layer.sessions(16, context) as step_s:
            del begun[:16]  # the states of sessions that are reserved, and have not begun
            for _ in range(5):
                assert step_s(16) > 0
        assert len(begun) == 1
    assert engine.kv.free_tokens == engine.kv.tokens
