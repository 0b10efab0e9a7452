"""What a model's files may make transformers load: nothing but the model."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from dht.checkpoints.library_files import CODE_KEYS, without_code
from dht.checkpoints.model_files import library_config, read_config
from dht.errors import UserError
from dht.process.json_file import DEPTH_MAX, read_object
from testing.paths import ROOT

BROOK = ROOT / "models" / "brook"
HUB = "somebody/kernels"


def written(path: Path, name: str = "config.json", **changes: Any) -> Path:
    """A directory with the bundled model's configuration, changed."""
    said = json.loads((BROOK / "config.json").read_text()) | changes
    (path / name).write_text(json.dumps(said))
    return path


@pytest.mark.parametrize("key", sorted(CODE_KEYS - {"auto_map"}))
def test_a_configuration_names_nothing_that_is_loaded(tmp_path: Path, key: str) -> None:
    inner = {"model_type": "llama", key: HUB}
    directory = written(tmp_path, **{key: HUB, "text_config": inner, "list_of": [{key: HUB}]})
    assert HUB not in str(read_config(directory))
    assert HUB not in str(library_config(directory).to_dict())


def test_no_kernel_of_a_hub_is_asked_for(tmp_path: Path) -> None:
    import torch

    from node.model.inspection.meta_model import model_of

    wished = {key: HUB for key in CODE_KEYS if "implementation" in key}
    config = library_config(written(tmp_path, **wished))
    assert model_of(config, torch.float32, None).config._attn_implementation != HUB
    assert os.environ["USE_HUB_KERNELS"] == "0"


def test_no_other_configuration_is_read_than_the_one_that_is_hashed(tmp_path: Path) -> None:
    written(tmp_path, "config.0.0.0.json", vocab_size=7)
    config = library_config(written(tmp_path, configuration_files=["config.0.0.0.json"]))
    assert config.vocab_size != 7


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer", "vision_layers", "depth"])
def test_no_number_makes_a_library_build_without_end(tmp_path: Path, key: str) -> None:
    for said in ({key: 10**9}, {"text_config": {key: 1 << 40}}, {"x": [{key: -5}]}):
        with pytest.raises(UserError, match=key):
            library_config(written(tmp_path, **said))


def test_what_a_configuration_says_of_the_model_stays() -> None:
    said = json.loads((BROOK / "config.json").read_text())
    assert without_code(said) == said


def test_nesting_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a":' * (DEPTH_MAX - 1) + "1" + "}" * (DEPTH_MAX - 1))
    assert read_object(path)
    for deep in (DEPTH_MAX + 2, 900, 100_000):
        path.write_text('{"a":' * deep + "1" + "}" * deep)
        with pytest.raises(ValueError, match="nested too deeply"):
            read_object(path)
        path.write_text('{"a":' + "[" * deep + "]" * deep + "}")
        with pytest.raises(ValueError, match="nested too deeply"):
            read_object(path)
        with pytest.raises(UserError):
            read_config(tmp_path)


def test_whatever_a_library_raises_is_the_user_s_error(tmp_path: Path) -> None:
    odd = {"hidden_size": {}, "rope_scaling": [], "layer_types": 5, "attribute_map": {"a": "a"}}
    for key, value in odd.items():
        shutil.rmtree(tmp_path, ignore_errors=True)
        tmp_path.mkdir()
        try:
            library_config(written(tmp_path, **{key: value}))
        except UserError:
            continue


def test_a_full_disk_is_no_fault_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(OSError, match="gone"):
        library_config(written(tmp_path))
