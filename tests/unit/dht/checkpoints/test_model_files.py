"""Which class of transformers a model's configuration stands for."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from dht.checkpoints.hub import served_name
from dht.checkpoints.model_files import (
    directory_fingerprint,
    directory_root,
    library_config,
    library_type,
    read_config,
    shards_of,
    sizes_of,
)
from dht.errors import UserError
from dht.messages.types import RECORD_BOUNDS

TINY = {"num_hidden_layers": 3, "max_position_embeddings": 64, "vocab_size": 50}


def write(directory: Path, **config: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_code_of_its_own_is_left_aside_where_the_library_has_the_class(tmp_path: Path) -> None:
    code = {"AutoConfig": "its_own.Config", "AutoModelForCausalLM": "its_own.Model"}
    (tmp_path / "its_own.py").write_text("raise AssertionError('never executed')")
    write(tmp_path, model_type="llama", auto_map=code, **TINY)
    assert type(library_config(tmp_path)).__name__ == "LlamaConfig"
    assert sizes_of(library_config(tmp_path)) == (3, 64, 50)


def test_a_type_of_its_own_goes_by_the_class_that_it_names(tmp_path: Path) -> None:
    write(
        tmp_path,
        model_type="kimi_k2",
        architectures=["DeepseekV3ForCausalLM"],
        auto_map={"AutoConfig": "its_own.Config"},
        **TINY,
    )
    config = library_config(tmp_path)
    assert type(config).__name__ == "DeepseekV3Config"
    assert sizes_of(config) == (3, 64, 50)
    assert not hasattr(config, "auto_map")


@pytest.mark.parametrize("architectures", [None, [], "LlamaForCausalLM", {}, [["x"]], ["Its"]])
def test_what_only_its_own_code_could_run_is_refused(architectures: Any, tmp_path: Path) -> None:
    config = {"model_type": "its_own", "architectures": architectures}
    assert library_type(config) is None
    write(tmp_path, **config, auto_map={})
    with pytest.raises(UserError, match="never executed"):
        read_config(tmp_path)
    write(tmp_path, **config)
    with pytest.raises(UserError, match="is not understood"):
        library_config(tmp_path)


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}


@pytest.mark.parametrize(
    ("kind", "rope", "context"),
    [
        ("qwen2", {**YARN, "original_max_position_embeddings": 64}, 256),  # Qwen's README
        ("qwen3", {**YARN, "original_max_position_embeddings": 48}, 192),
        ("qwen2", {**YARN, "original_max_position_embeddings": 16}, 64),  # extended already
        ("qwen2", YARN, 256),
        ("qwen2", {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}, 64),
        ("qwen2", {"rope_type": "default", "rope_theta": 1e6}, 64),
        (
            "gemma3_text",
            {
                "full_attention": {**YARN, "original_max_position_embeddings": 64},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            256,
        ),
    ],
)
def test_yarn_extends_the_original_context(
    kind: str, rope: dict[str, Any], context: int, tmp_path: Path
) -> None:
    write(tmp_path, model_type=kind, rope_parameters=rope, **TINY)
    assert sizes_of(library_config(tmp_path))[1] == context


@pytest.mark.parametrize(
    ("family", "key"), [("mpt", "max_seq_len"), ("whisper", "max_target_positions"),
                        ("bloom", "seq_length"), ("gpt2", "n_positions")]
)  # fmt: skip
def test_the_context_is_found_by_each_of_its_names(family: str, key: str, tmp_path: Path) -> None:
    write(tmp_path, model_type=family, **{key: 64})
    assert sizes_of(library_config(tmp_path))[1] == 64


def test_a_context_longer_than_messages_count_ends_there(tmp_path: Path) -> None:
    """Llama 4 Scout's has 10,485,760 tokens, and peers could announce none of it."""
    write(tmp_path, model_type="llama", **TINY | {"max_position_embeddings": 10 << 20})
    assert sizes_of(library_config(tmp_path))[1] == RECORD_BOUNDS.context_tokens_max
    assert directory_fingerprint("", tmp_path)


def test_a_context_without_tokens_is_refused(tmp_path: Path) -> None:
    write(tmp_path, model_type="llama", **TINY | {"max_position_embeddings": -5})
    with pytest.raises(UserError, match="context of -5 tokens"):
        directory_fingerprint("", tmp_path)


def test_a_configuration_that_the_library_refuses_is_a_fault_of_the_model(tmp_path: Path) -> None:
    write(tmp_path, model_type="llama", layer_types=["spiral"] * 3, **TINY)
    with pytest.raises(UserError, match=r"is not understood.*spiral"):
        library_config(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere all names of files are text")
def test_a_directory_may_have_a_name_of_any_bytes(tmp_path: Path) -> None:
    directory = tmp_path / os.fsdecode(b"caf\xe9")
    directory.mkdir()
    assert directory_root(directory) == ""
    assert served_name(str(directory)) == "caf"


def test_the_file_is_the_one_that_the_configuration_chooses(tmp_path: Path) -> None:
    def choose(name: object) -> None:
        config = {"model_type": "llama", "transformers_weights": name}
        (tmp_path / "config.json").write_text(json.dumps(config))

    (tmp_path / "low").mkdir()
    for name in ("model.safetensors", "other.safetensors", "low/a.safetensors", "weights.bin"):
        (tmp_path / name).touch()
    index = {"weight_map": {"a": "other.safetensors", "b": "low/a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, shards in (
        (None, ("model.safetensors",)),
        ("other.safetensors", ("other.safetensors",)),
        ("low/a.safetensors", ("low/a.safetensors",)),
        ("model.safetensors", ("model.safetensors",)),
        ("model.safetensors.index.json", ("low/a.safetensors", "other.safetensors")),
    ):
        choose(name)
        assert shards_of(tmp_path) == shards
    for name in ("gone.safetensors", "../other.safetensors", "weights.bin", 3):
        choose(name)
        with pytest.raises(UserError, match=f"chooses the weights {name}"):
            shards_of(tmp_path)
