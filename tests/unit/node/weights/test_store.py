"""What is refused at open, in words, and what tells two models apart."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dht.errors import UserError
from node.weights.store import WeightStore

CONFIG = {"model_type": "llama", "hidden_size": 4}
INDEX = "model.safetensors.index.json"


def write(directory: Path, config: dict[str, Any] | None = None, rows: int = 2) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    tensors = {"a.weight": torch.ones(rows, 4), "b.weight": torch.zeros(4)}
    save_file(tensors, directory / "model.safetensors")
    return directory


def raw(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def header_of(**described: Any) -> bytes:
    return json.dumps({"a": described}).encode()


def index(names: dict[str, str] | Any) -> Callable[[Path], None]:
    return index_text(json.dumps({"weight_map": names}))


def index_text(text: str) -> Callable[[Path], None]:
    """An index in place of the single file, which would be taken before it."""

    def place(directory: Path) -> None:
        (directory / "model.safetensors").rename(directory / "one.safetensors")
        (directory / INDEX).write_text(text)

    return place


def model_file(content: bytes) -> Callable[[Path], None]:
    return lambda directory: (directory / "model.safetensors").write_bytes(content) and None


def config_text(text: str) -> Callable[[Path], None]:
    return lambda directory: (directory / "config.json").write_text(text) and None


def truncate(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


def lengthen(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"more")


def only_bin(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def outside(directory: Path) -> None:
    write(directory.parent / "other")
    index({"a.weight": "../other/model.safetensors"})(directory)


F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), "has no config.json"),
    "bad json": (config_text("{"), "cannot be read"),
    "deep json": (config_text("[" * 100_000), "cannot be read"),
    "a list": (config_text("[]"), "no JSON object"),
    "no type": (config_text("{}"), "no model_type"),
    "auto_map": (config_text('{"model_type": "x", "auto_map": {}}'), "never executed"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "no safetensors files"),
    "only bin": (only_bin, "only pytorch_model.bin, which can run code"),
    "truncated": (truncate, "download it again"),
    "too long": (lengthen, "download it again"),
    "empty": (model_file(b""), "damaged"),
    "short": (model_file(b"1234567"), "only 7 bytes"),
    "pointer": (model_file(b"version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    "garbage": (model_file(b"\xff" * 64), "damaged"),
    "not json": (model_file(raw(b"garbage!")), "header cannot be read"),
    "deep header": (model_file(raw(b"[" * 100_000)), "header cannot be read"),
    "header is a list": (model_file(raw(b"[]")), "header cannot be read"),
    "no offsets": (model_file(raw(header_of(dtype="F32", shape=[1]))), "cannot be read"),
    "wrong length": (model_file(raw(header_of(**{**F32, "shape": [2]}), b"1234")), "not fit"),
    "negative": (
        model_file(raw(header_of(dtype="F32", shape=[-1], data_offsets=[4, 0]), b"1234")),
        "`int` >= 0",
    ),
    "other dtype": (model_file(raw(header_of(**{**F32, "dtype": "F4"}), b"1234")), "dtype 'F4'"),
    "bad index": (index_text("{"), "no index"),
    "index of numbers": (index({"a": 1}), "no index"),
    "index is a list": (index(["a"]), "no index"),
    "missing shard": (index({"a.weight": "model-00001.safetensors"}), "not there"),
    "empty index": (index({}), "neither model.safetensors nor an index"),
    "shards alone": (lambda d: index({})(d) or (d / INDEX).unlink(), "neither model.safetensors"),
    "other system's root": (index({"a.weight": "C:/one.safetensors"}), "not there"),
    "outside": (outside, "not there"),
    "absolute": (index({"a.weight": "/etc/hostname"}), "not there"),
    "no name": (index({"a.weight": ""}), "not there"),
}


@pytest.mark.parametrize("case", list(DAMAGE))
def test_damage_is_named_at_open(case: str, tmp_path: Path) -> None:
    damage, words = DAMAGE[case]
    directory = write(tmp_path / "model")
    damage(directory)
    with pytest.raises(UserError, match=words) as caught:
        WeightStore.open(str(directory))
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere is not a directory"):
        WeightStore.open(str(tmp_path / "nowhere"))


def test_only_what_is_asked_is_read(tmp_path: Path) -> None:
    directory = write(tmp_path / "model")
    header = (directory / "model.safetensors").read_bytes()
    header_bytes = 8 + int.from_bytes(header[:8], "little")
    store = WeightStore.open(str(directory))
    assert store.bytes_read == 0
    read = dict(store.read(["b.weight"]))
    assert list(read) == ["b.weight"]
    assert store.bytes_read == header_bytes + 16
    with pytest.raises(UserError, match=r"no tensor c\.weight"):
        dict(store.read(["c.weight"]))


def test_a_file_that_changes_after_open_is_named(tmp_path: Path) -> None:
    directory = write(tmp_path / "model")
    store = WeightStore.open(str(directory))
    (directory / "model.safetensors").unlink()
    with pytest.raises(UserError, match="cannot be read"):
        dict(store.read(["a.weight"]))


def test_the_root_follows_what_makes_a_model(tmp_path: Path) -> None:
    def root(name: str, config: dict[str, Any] | None = None, rows: int = 2) -> str:
        return WeightStore.open(str(write(tmp_path / name, config, rows))).root

    first = root("first")
    volatile = {"transformers_version": "9", "torch_dtype": "float16", "use_cache": False}
    assert root("same", {**volatile, **CONFIG}) == first
    assert root("shape", rows=3) != first
    other = write(tmp_path / "numbers")
    save_file(
        {"a.weight": torch.ones(2, 4), "b.weight": torch.ones(4)}, other / "model.safetensors"
    )
    assert WeightStore.open(str(other)).root != first
    assert root("config", {**CONFIG, "rope_theta": 5.0}) != first


def test_shards_are_read_like_one_file(tmp_path: Path) -> None:
    parts = write(tmp_path / "parts")
    save_file({"a.weight": torch.ones(2, 4)}, parts / "one.safetensors")
    save_file({"b.weight": torch.zeros(4)}, parts / "two.safetensors")
    index({"a.weight": "one.safetensors", "b.weight": "two.safetensors"})(parts)
    assert dict(WeightStore.open(str(parts)).read(["b.weight"]))["b.weight"].tolist() == [0.0] * 4


ONES, TWOS = torch.ones(2, 4), torch.full((2, 4), 2.0)


def taken(directory: Path) -> float:
    """The number that ``a.weight`` is made of."""
    [(_, tensor)] = WeightStore.open(str(directory)).read(["a.weight"])
    return float(tensor[0, 0])


def test_a_single_file_goes_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    directory = write(tmp_path / "both")
    save_file({"a.weight": TWOS}, directory / "two.safetensors")
    for said in ('{"weight_map": {"a.weight": "two.safetensors"}}', '{"metadata": {}}', "{"):
        (directory / INDEX).write_text(said)
        assert taken(directory) == 1.0


def test_of_a_tensor_in_two_files_the_later_counts_as_in_transformers(tmp_path: Path) -> None:
    directory = write(tmp_path / "twice")
    save_file({"a.weight": TWOS}, directory / "two.safetensors")
    names = {"a.weight": "one.safetensors", "b.weight": "two.safetensors"}
    index(names)(directory)
    assert taken(directory) == 2.0


@pytest.mark.parametrize("name", ["./one.safetensors", "parts//one.safetensors", "./parts/../x"])
def test_an_index_may_name_files_by_any_path_within(name: str, tmp_path: Path) -> None:
    directory = write(tmp_path / "model")
    index({"a.weight": name})(directory)
    if "parts" in name:
        (directory / "parts").mkdir()
        (directory / "one.safetensors").rename(directory / "parts" / "one.safetensors")
    if ".." in name:
        with pytest.raises(UserError, match="not there"):
            taken(directory)
    else:
        assert taken(directory) == 1.0


def test_an_entry_that_nobody_needs_is_no_fault(tmp_path: Path) -> None:
    directory = write(tmp_path / "model")
    index({"a.weight": "one.safetensors", "old.weight": "one.safetensors"})(directory)
    assert taken(directory) == 1.0
    with pytest.raises(UserError, match=r"no tensor old\.weight"):
        dict(WeightStore.open(str(directory)).read(["old.weight"]))
