"""A kept profile saves the measurement, and nothing that is wrong with it harms."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dht.messages.types import stage_bytes
from node.engine.engine import Engine, EngineConfig
from node.profiling import profile_cache
from node.profiling.layer_fit import Timing
from node.profiling.layer_profile import feasible, room_for_timing
from node.profiling.layer_rates import Profile
from node.profiling.profile_cache import ProfileKey, keep_profile, kept_profile, profiled
from node.weights.store import WeightStore
from testing.random_model import make_llama

KEY = ProfileKey(device="d", driver="1", threads=2, model="m", precision="float32/", torch="2")
PROFILE = Profile(
    points=(Timing(batch=1, context_tokens=1, seconds=0.001),),
    checks=(),
    prefills=(Timing(batch=32, context_tokens=0, seconds=0.01),),
    kv_tokens=64,
)


def test_what_was_kept_is_recalled_for_the_same_key_only(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "cache"
    assert kept_profile(folder, KEY) is None
    keep_profile(folder, KEY, PROFILE)
    assert kept_profile(folder, KEY) == PROFILE
    others = [{"device": "e"}, {"driver": "2"}, {"threads": 1}, {"model": "n"}, {"torch": "3"}]
    for other in [*others, {"precision": "int8/"}, {"version": 99}]:
        assert kept_profile(folder, replace(KEY, **other)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-20],
        lambda text: "[]",
        lambda text: "[" * 100_000,
        lambda text: text.replace("0.001", "-1.0"),
        lambda text: text.replace("0.001", "NaN"),
        lambda text: text.replace('"context_tokens": 1,', '"context_tokens": "x",'),
        lambda text: text.replace('"batch"', '"other"'),
        lambda text: text.replace('"kv_tokens": 64', '"kv_tokens": "64"'),
        lambda text: json.dumps({**json.loads(text), "key": {}}),
        lambda text: text + " " * profile_cache.FILE_BYTES_MAX,
    ],
)
def test_a_damaged_file_is_none(tmp_path: Path, damage: "object") -> None:
    keep_profile(tmp_path, KEY, PROFILE)
    path = KEY.path(tmp_path)
    path.write_text(damage(path.read_text()))  # type: ignore[operator]
    assert kept_profile(tmp_path, KEY) is None


def test_a_folder_that_cannot_be_written_costs_a_measurement_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    keep_profile(tmp_path / "file" / "sub", KEY, PROFILE)
    assert kept_profile(tmp_path, KEY) is None


def test_a_second_engine_measures_nothing_unless_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_llama(tmp_path / "m", hidden=64, layers=3, vocab=64, context_tokens=64)
    store = WeightStore.open(str(directory))

    def engine(memory_bytes: int = 64 << 20) -> Engine:
        return Engine(EngineConfig(store=store, name="tiny", memory_bytes=memory_bytes))

    measured: list[Engine] = []

    def measure(engine: Engine) -> Profile:
        measured.append(engine)
        timed = tuple(
            Timing(batch=batch, context_tokens=context, seconds=0.001)
            for batch, context in feasible(engine, room_for_timing(engine))
        )
        room = room_for_timing(engine)
        return Profile(points=timed, checks=(), prefills=(), kv_tokens=room)

    monkeypatch.setattr(profile_cache, "measure", measure)
    spec = engine().spec
    small = stage_bytes(spec, 1, 2, spec.context_tokens)
    first, remembered = profiled(engine(small), tmp_path, refresh=False)
    assert not remembered
    assert profiled(engine(small), tmp_path, refresh=False) == (first, True)
    more, remembered = profiled(engine(), tmp_path, refresh=False)
    assert not remembered  # there is room for points that were not measured
    assert len(more.points) > len(first.points)
    assert profiled(engine(small), tmp_path, refresh=False) == (more, True)
    assert profiled(engine(), tmp_path, refresh=True) == (more, False)
    assert len(measured) == 3
