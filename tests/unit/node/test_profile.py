"""What the profile says, by law and from the command."""

import itertools
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.random_model import make_llama
from dht.command_line import EXIT_DONE, EXIT_USER, run_command
from node import profile
from node.engine import Engine, EngineConfig
from node.profile import (
    BATCHES,
    PREFILLS,
    LayerTimes,
    time_layer,
    time_prefill,
    tokens_per_s,
)
from node.weights import WeightStore

LAYERS = 6


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(
        tmp_path_factory.mktemp("profile"), hidden=64, layers=LAYERS, vocab=64, context_tokens=64
    )


def engine_of(directory: Path, memory_bytes: int = 64 << 20) -> Engine:
    store = WeightStore.open(str(directory))
    return Engine(EngineConfig(store=store, name="tiny", memory_bytes=memory_bytes))


@pytest.mark.parametrize("memory_bytes", [400_000, 800_000, 64 << 20])
def test_more_layers_are_slower_and_all_that_fit_are_listed(
    directory: Path, memory_bytes: int
) -> None:
    engine = engine_of(directory, memory_bytes)
    rates = tokens_per_s(engine, time_layer(engine))
    assert len(rates) == engine.layers_max
    assert all(a > b > 0 for a, b in itertools.pairwise(rates))
    assert engine.kv_tokens_free >= engine.kv_tokens_min  # no session of the profile is left


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=len(BATCHES)))
def test_rates_fall_with_layers_whatever_was_measured(seconds: list[float]) -> None:
    times = LayerTimes(seconds=dict(zip(BATCHES, seconds, strict=False)))
    for sessions in (1, 4, 1000):
        rates = [profile._rate(layers, sessions, times.seconds) for layers in range(1, 20)]
        assert all(a > b > 0 for a, b in itertools.pairwise(rates))


def test_one_quiet_moment_is_enough(directory: Path) -> None:
    """Timings are the least of several: a slow machine with one fast step counts as fast."""
    now, calls = 0.0, 0

    def clock() -> float:
        nonlocal now, calls
        calls += 1
        now += 0.001 if calls % 5 == 0 else 0.004
        return now

    times = time_layer(engine_of(directory), clock)
    assert list(times.seconds) == list(BATCHES)
    assert all(seconds == pytest.approx(0.001) for seconds in times.seconds.values())


def test_prompts_are_timed_where_there_is_room_and_nothing_is_left(directory: Path) -> None:
    engine = engine_of(directory, 8 << 20)
    time_layer(engine)
    free = engine.kv_tokens_free
    seconds = time_prefill(engine)
    assert seconds
    assert tuple(seconds) == PREFILLS[: len(seconds)]
    assert all(took > 0 for took in seconds.values())
    assert engine.kv_tokens_free == free


def test_the_command_prints_one_object(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["profile", str(directory), "--cpu", "--memory", "0.05"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--json"])
    assert run_command(profile.parse, profile.main) == EXIT_DONE
    told = json.loads(capsys.readouterr().out)
    assert len(told["tokens_per_s"]) == told["layers_max"] == LAYERS
    assert set(told["layer_s"]) == {str(batch) for batch in BATCHES}
    monkeypatch.setattr(sys, "argv", arguments)
    assert run_command(profile.parse, profile.main) == EXIT_DONE
    assert "6 layers:" in capsys.readouterr().out


def test_the_command_names_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["profile", str(tmp_path / "nowhere")])
    assert run_command(profile.parse, profile.main) == EXIT_USER
    assert capsys.readouterr().err.startswith("error: ")
