"""What is loaded is checked: any flipped bit is named before it can serve."""

import asyncio
import hashlib
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub.constants as hub_constants
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors.torch import save_file

import node.weights.store as store_module
from dht.checkpoints.model_files import (
    MANIFEST,
    directory_fingerprint,
    directory_root,
    read_manifest,
)
from dht.errors import UserError
from node.model.layer_range import ModelLayout
from node.weight_hashes import main
from node.weights.safetensors_header import DamagedError
from node.weights.store import WeightStore
from testing.paths import ROOT
from tests.examples import examples

BROOK = ROOT / "models" / "brook"
SHARDS = {
    "model-00001-of-00002.safetensors": {"a.weight": (6, 5), "b.weight": (7,)},
    "model-00002-of-00002.safetensors": {"c.weight": (4, 4)},
}
DTYPES = {"a.weight": torch.float32, "b.weight": torch.bfloat16, "c.weight": torch.float16}


class _Arguments:
    def __init__(self, model: Path, *, check: bool = False) -> None:
        self.model, self.check = str(model), check


def hash_directory(directory: Path, *, check: bool = False) -> int:
    arguments: Any = _Arguments(directory, check=check)
    return asyncio.run(main(arguments))


def write(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    generator = torch.Generator().manual_seed(0)
    index = {}
    for shard, shapes in SHARDS.items():
        tensors = {
            name: torch.randn(shape, generator=generator).to(DTYPES[name])
            for name, shape in shapes.items()
        }
        save_file(tensors, directory / shard, metadata={"format": "pt"})
        index |= dict.fromkeys(shapes, shard)
    text = json.dumps({"weight_map": index})
    (directory / "model.safetensors.index.json").write_text(text)
    return directory


@pytest.fixture(scope="module")
def hashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write(tmp_path_factory.mktemp("hashed") / "model")
    assert hash_directory(directory) == 0
    return directory


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    store = WeightStore.open(str(directory))
    return dict(store.read(list(store.tensors)))


def test_the_manifest_holds_what_sha256sum_says(hashed: Path) -> None:
    manifest = read_manifest(hashed / MANIFEST)
    assert manifest is not None
    assert set(manifest.shards) == set(SHARDS)
    for name, hashes in manifest.shards.items():
        content = (hashed / name).read_bytes()
        assert hashes.sha256 == hashlib.sha256(content).hexdigest()
        assert hashes.size_bytes == len(content)
        assert set(hashes.tensors) == set(SHARDS[name])
    assert {n: t.dtype for n, t in read_all(hashed).items()} == DTYPES


@examples(75, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_flipped_bit_is_found_and_named(hashed: Path, data: st.DataObject) -> None:
    shard = hashed / data.draw(st.sampled_from(sorted(SHARDS)))
    right = shard.read_bytes()
    bit = data.draw(st.integers(0, 8 * len(right) - 1))
    wrong = bytearray(right)
    wrong[bit // 8] ^= 1 << bit % 8
    manifest = read_manifest(hashed / MANIFEST)
    assert manifest is not None
    shard.write_bytes(wrong)
    try:
        with pytest.raises(UserError) as caught:
            read_all(hashed)
    finally:
        shard.write_bytes(right)
    assert isinstance(caught.value, DamagedError)
    assert shard.name in str(caught.value)
    header_bytes = 8 + int.from_bytes(right[:8], "little")
    if bit // 8 >= header_bytes:
        assert any(
            f"tensor {name} does not match" in str(caught.value) for name in SHARDS[shard.name]
        )


def test_a_flip_outside_what_is_read_does_not_stop_the_rest(hashed: Path) -> None:
    """A peer checks what it reads; a flip in another layer's tensor is that peer's matter."""
    shard = hashed / "model-00002-of-00002.safetensors"
    right = shard.read_bytes()
    shard.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    try:
        store = WeightStore.open(str(hashed))
        assert len(dict(store.read(["a.weight", "b.weight"]))) == 2
        with pytest.raises(DamagedError, match=r"c\.weight does not match"):
            dict(store.read(["c.weight"]))
    finally:
        shard.write_bytes(right)


def test_check_compares_whole_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write(tmp_path / "model")
    with pytest.raises(UserError, match="write it first"):
        hash_directory(directory, check=True)
    hash_directory(directory)
    assert hash_directory(directory, check=True) == 0
    assert "model-00001-of-00002.safetensors" in capsys.readouterr().out
    shard = directory / "model-00002-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-3] ^= 64
    shard.write_bytes(content)
    with pytest.raises(UserError, match="00002-of-00002"):
        hash_directory(directory, check=True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "damaged"),
        (b'{"format": 2, "shards": {}}', "damaged"),
        (b'{"format": 1, "shards": {}}', "does not know model-00001"),
        (b'{"format": 1, "shards": {"x": {"size_bytes": 1, "sha256": "zz"}}}', "damaged"),
    ],
)
def test_a_manifest_that_cannot_be_right_is_refused(
    content: bytes, words: str, tmp_path: Path
) -> None:
    directory = write(tmp_path / "model")
    (directory / MANIFEST).write_bytes(content)
    with pytest.raises(UserError, match=words):
        WeightStore.open(str(directory))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_that_are_not_finite_are_named(
    value: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    directory = write(tmp_path / "model")
    tensor = torch.zeros(4, 4)
    tensor[2, 1] = value
    save_file({"c.weight": tensor.to(dtype)}, directory / "model-00002-of-00002.safetensors")
    store = WeightStore.open(str(directory))
    with pytest.raises(DamagedError, match=r"00002\.safetensors is damaged: c\.weight holds NaN"):
        dict(store.read(["c.weight"]))


def test_a_range_reads_its_own_bytes_from_the_disk(tmp_path: Path) -> None:
    """Counted by the kernel: all that goes through read(), headers and hashes included."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    count, numbers = 16, 1 << 16
    tensors = {f"layers.{n}.weight": torch.ones(numbers) for n in range(count)}
    save_file(tensors, tmp_path / "model.safetensors")
    process = psutil.Process()
    mine = [f"layers.{n}.weight" for n in (3, 4, 5)]
    dict(WeightStore.open(str(tmp_path)).read(mine))  # imports happen here
    before = process.io_counters().read_chars
    store = WeightStore.open(str(tmp_path))
    dict(store.read(random.Random(0).sample(mine, len(mine))))
    read_bytes = process.io_counters().read_chars - before
    assigned_bytes = 3 * numbers * 4
    assert assigned_bytes <= read_bytes <= 1.1 * assigned_bytes
    assert assigned_bytes <= store.bytes_read <= read_bytes


def test_the_first_open_makes_the_manifest_and_the_next_reads_it(tmp_path: Path) -> None:
    directory = write(tmp_path / "model")
    assert directory_root(directory) == ""
    told: list[tuple[int, int]] = []
    first = WeightStore.open(str(directory), lambda done, total: told.append((done, total)))
    weights = sum(entry.size_bytes for entry in first.tensors.values())
    assert told[-1][0] == weights <= told[-1][1]
    assert directory_root(directory) == first.root
    told.clear()
    again = WeightStore.open(str(directory), lambda done, total: told.append((done, total)))
    assert again.root == first.root
    assert told == []


def test_hashes_of_a_directory_that_nobody_may_write_are_kept_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write(tmp_path / "model")
    monkeypatch.setattr(hub_constants, "HF_HOME", str(tmp_path / "home"))

    def refuse(path: Path, content: bytes) -> None:
        if path.parent == directory:
            raise PermissionError(path)
        path.write_bytes(content)

    monkeypatch.setattr(store_module, "write_whole", refuse)
    first = WeightStore.open(str(directory))
    assert not (directory / MANIFEST).exists()
    assert directory_root(directory) == first.root


def test_brooks_configuration_tells_the_fingerprint_that_its_peers_announce() -> None:
    store = WeightStore.open(str(BROOK))
    spec = ModelLayout.of(store, "float32").spec("brook")
    assert directory_root(BROOK) == store.root == spec.root
    assert directory_fingerprint(store.root, BROOK) == spec.fingerprint


def test_another_model_in_the_place_of_one_is_no_damage_without_a_way_out(hashed: Path) -> None:
    """Who exports a model anew to its directory hears what to do, and that way works."""
    shard = hashed / "model-00002-of-00002.safetensors"
    right = shard.read_bytes()
    store = WeightStore.open(str(hashed))
    store.fetch(store.tensors)
    try:
        save_file({"c.weight": torch.zeros(4, 4, dtype=torch.float16)}, shard)
        for looks in (partial(store.fetch, store.tensors), partial(read_all, hashed)):
            with pytest.raises(DamagedError, match="if it was changed on purpose, remove") as told:
                looks()
            assert str(hashed / MANIFEST) in str(told.value)
        shard.unlink()
        with pytest.raises(UserError, match="No such file"):
            store.fetch(store.tensors)
    finally:
        shard.write_bytes(right)
    store.fetch(store.tensors)  # as it was, though it is another file
    with_numbers = shard.read_bytes()
    (hashed / MANIFEST).unlink()
    save_file({"c.weight": torch.zeros(4, 4, dtype=torch.float16)}, shard)
    try:
        assert read_all(hashed)["c.weight"].abs().max() == 0
    finally:
        shard.write_bytes(with_numbers)
        hash_directory(hashed)
