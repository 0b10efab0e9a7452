"""Files of a model that somebody else made: what cannot be right is refused in one line."""

import contextlib
import functools
import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import huggingface_hub.constants
import numpy as np
import pytest
from hypothesis import given

from client.answer.defaults import defaults_of
from client.text.chat_template import ChatTemplate
from client.text.tokenizer import Tokenizer, stop_token_ids
from dht.checkpoints.model_files import (
    INDEX,
    MANIFEST,
    SINGLE,
    directory_fingerprint,
    library_config,
    read_config,
    read_manifest,
    shard_names,
)
from dht.errors import UserError
from node.weights import shard_header
from node.weights.safetensors_header import PREFIX_BYTES
from node.weights.store import WeightStore
from testing.paths import ROOT
from tests.choices import Choices, choices
from tests.examples import examples
from tests.fuzz.laws import lawful
from tests.fuzz.values import ODD, damaged, damaged_bytes

pytestmark = pytest.mark.property

HEADER = {
    "__metadata__": {"format": "pt"},
    "a.weight": {"dtype": "F32", "shape": [6, 5], "data_offsets": [0, 120]},
    "b.weight": {"dtype": "BF16", "shape": [7], "data_offsets": [120, 134]},
    "c": {"dtype": "U8", "shape": [], "data_offsets": [134, 135]},
}
DATA_BYTES = 135
MODEL = ROOT / "models" / "brook"
TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"
TEMPLATES = (
    "{{ " + "(" * 3000, "{% if x %}" * 500, "{{ " + "1+" * 3000 + "1 }}", TEMPLATE,
    "{{ a.__class__.__mro__ }}", "{% for i in range(99999999) %}{% endfor %}", "{% import 'x' %}",
    "{{ 1 // 0 }}", "{{ '%d' % 'x' }}", "{% set x = 1 if %}", "{{ messages[7].x.y }}",
)  # fmt: skip
JSON_ODD = (*ODD, 10**30, 10**3000, "F64", "I8", "model.safetensors", "../x", "c:x", [10**18] * 9)
NOT_PYTHONS = (b"Infinity", b"NaN", b"1e999", b"-1e999", b'"\\ud800"', b"1" * 5000, b"[" * 9000)
"""What may stand in JSON's place of a value and is no JSON value that Python could write."""


def json_of(value: Any, drawn: Choices) -> bytes:
    """The text of ``value``, which is damaged in its values or in its bytes."""
    if drawn.yes():
        return damaged_bytes(json.dumps(value).encode(), drawn)
    text = json.dumps(damaged(value, drawn, (*JSON_ODD, *("@here@",) * len(JSON_ODD))))
    return text.encode().replace(b'"@here@"', drawn.one_of(NOT_PYTHONS))


@examples(75)
@given(choices(120))
def test_a_safetensors_header_is_right_or_refused(drawn: Choices) -> None:
    header = json_of(HEADER, drawn)
    raw = struct.pack("<Q", len(header)) + header
    size_bytes = len(raw) + drawn.one_of((DATA_BYTES, DATA_BYTES, 0))
    if drawn.below(4) == 0:
        raw = damaged_bytes(raw, drawn)

    def read() -> None:
        length = shard_header.header_bytes_of(raw[:PREFIX_BYTES], size_bytes, "m", "m")
        entries = shard_header.parse_header(raw[:length], size_bytes, "m", "m")
        assert sum(entry.size_bytes for entry in entries.values()) <= size_bytes
        for name, entry in entries.items():
            assert f"{name} {entry.numbers}".encode()

    lawful(read, UserError)


@functools.cache
def gguf_bytes() -> bytes:
    """A file whose metadata makes a configuration; it ends with the numbers of a tensor."""
    with tempfile.TemporaryDirectory() as directory:
        writer = gguf.GGUFWriter(Path(directory) / "m.gguf", "llama")
        for key in ("block_count", "embedding_length", "attention.head_count"):
            writer.add_uint32(f"llama.{key}", 2)
        writer.add_float32("llama.rope.freq_base", 1e4)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b", "ab", "<end>"])
        writer.add_token_types([1, 1, 1, 3])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(3)
        writer.add_chat_template(TEMPLATE)
        writer.add_tensor("token_embd.weight", np.ones((4, 2), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return (Path(directory) / "m.gguf").read_bytes()


@examples(75)
@given(choices(120))
def test_a_gguf_header_is_right_or_refused(drawn: Choices) -> None:
    raw = damaged_bytes(gguf_bytes(), drawn)

    def read() -> None:
        length = shard_header.header_bytes_of(raw, len(raw), "m.gguf", "m.gguf")
        entries = shard_header.parse_header(raw[:length], len(raw), "m.gguf", "m.gguf")
        assert sum(entry.size_bytes for entry in entries.values()) <= len(raw)

    lawful(read, UserError)


@examples(40)
@given(choices(120))
def test_a_gguf_file_is_opened_or_refused(drawn: Choices) -> None:
    raw = damaged_bytes(gguf_bytes(), drawn) if drawn.below(8) else gguf_bytes()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "m.gguf"
        file.write_bytes(raw)
        with mock.patch.object(huggingface_hub.constants, "HF_HOME", directory):
            lawful(lambda: template(WeightStore.open(str(file)).directory), UserError)


def store(directory: Path) -> None:
    opened = WeightStore.open(str(directory))
    assert len(opened.root) == 64
    dict(opened.read(list(opened.tensors)))


def manifest(directory: Path) -> None:
    read_manifest(directory / MANIFEST)


def defaults(directory: Path) -> None:
    defaults_of(directory)
    assert all(isinstance(each, int) for each in stop_token_ids(directory))


def template(directory: Path) -> None:
    loaded = ChatTemplate.load(directory)
    if loaded is not None:
        loaded.render([{"role": "user", "content": "x"}])


def shards(directory: Path) -> None:
    assert shard_names("m", {"x"}, directory) == ("x",)


FILES: dict[str, tuple[Any, Callable[[Path], object]]] = {
    "config.json": (
        {"model_type": "llama", "hidden_size": 8, "eos_token_id": [1, 2], "rope": {"x": 1.0}},
        read_config,
    ),
    INDEX: ({"metadata": {}, "weight_map": {"a": "x", "b": "x"}}, shards),
    MANIFEST: (
        {
            "format": 1,
            "shards": {
                SINGLE: {
                    "size_bytes": 9,
                    "sha256": "0" * 64,
                    "header_sha256": "0" * 64,
                    "tensors": {"a": "0" * 64},
                }
            },
        },
        manifest,
    ),
    "generation_config.json": (
        {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "eos_token_id": [1, 2]},
        defaults,
    ),
    "tokenizer_config.json": (
        {
            "chat_template": [{"name": "default", "template": TEMPLATE}],
            "bos_token": {"content": "<s>"},
            "eos_token": "</s>",
        },
        template,
    ),
}


@pytest.mark.parametrize("name", FILES)
@examples(40)
@given(drawn=choices(120))
def test_a_models_file_is_right_or_refused(name: str, drawn: Choices) -> None:
    right, read = FILES[name]
    content = json_of(right, drawn)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / name).write_bytes(content)
        lawful(lambda: read(Path(directory)), UserError)


@examples(40)
@given(choices(60))
def test_a_chat_template_renders_or_is_refused(drawn: Choices) -> None:
    source = drawn.one_of(TEMPLATES).encode()
    content = damaged_bytes(source, drawn) if drawn.yes() else source
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "chat_template.jinja").write_bytes(content)
        lawful(lambda: template(Path(directory)), UserError)


@examples(40)
@given(choices(120))
def test_a_model_is_opened_or_refused(drawn: Choices) -> None:
    header = json_of(HEADER, drawn) if drawn.yes() else json.dumps(HEADER).encode()
    config, _ = FILES["config.json"]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        raw = struct.pack("<Q", len(header)) + header + bytes([drawn.below(256)]) * DATA_BYTES
        (path / SINGLE).write_bytes(raw)
        (path / "config.json").write_bytes(
            json_of(config, drawn) if drawn.yes() else json.dumps(config).encode()
        )
        lawful(lambda: store(path), UserError)


@functools.cache
def small_tokenizer() -> dict[str, Any]:
    """The bundled model's tokenizer with a part of its vocabulary."""
    said: dict[str, Any] = json.loads((MODEL / "tokenizer.json").read_text())
    model = said["model"]
    kept = {token: number for number, token in enumerate([*model["vocab"]][:300])}
    model["merges"] = [each for each in model["merges"] if {*each, "".join(each)} <= kept.keys()]
    model["vocab"] = kept
    return said


@examples(40)
@given(choices(120))
def test_a_tokenizer_is_read_or_refused(drawn: Choices) -> None:
    """Its library is written in Rust, whose panics nothing catches."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "tokenizer.json"
        file.write_bytes(json_of(small_tokenizer(), drawn))

        # Not measured: a model's files are read in a thread, and a panic writes its stack.
        with contextlib.suppress(UserError):
            tokenizer = Tokenizer.load(Path(directory))
            assert tokenizer is not None
            ids = tokenizer.encode("Once upon a time \u00e9\U0001f600<|x|>")
            tokenizer.decode((*ids[:20], 0, 299, 1 << 20))
            tokenizer.token_text(0)


@examples(40)
@given(choices(120))
def test_a_configuration_is_read_by_the_library_or_refused(drawn: Choices) -> None:
    """As transformers is asked to read it, wherever it comes from."""
    said = json.loads((MODEL / "config.json").read_text())
    odd = {"attn_implementation": "a/b", "auto_map": {"AutoConfig": "a--b.C"}, "text_config": said}
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "config.json"
        file.write_bytes(json_of(said | (odd if drawn.yes() else {}), drawn))

        # Not on the event loop: a library's time is its own.
        with contextlib.suppress(UserError):
            assert library_config(Path(directory))._attn_implementation != "a/b"
            directory_fingerprint("0" * 64, Path(directory))
