"""A model's JSON files as transformers may read them: they name no code, no kernels and no paths.

transformers takes an ``attn_implementation`` with a slash for a kernel on a hub that is to be
loaded and run, ``auto_map`` for Python files, ``configuration_files`` and ``tokenizer_file`` for
other files of this machine, and it builds as many layers as a number says.
"""

import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dht.json_file import read_object
from dht.messages.types import LAYERS_MAX

CODE_KEYS = frozenset(
    {
        *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
        *("_attn_implementation_autoset", "_flash_attn_2_enabled"),
        *("experts_implementation", "_experts_implementation"),
        "_experts_implementation_internal",
        *("kernel_config", "use_kernels", "allow_all_kernels"),
        *("auto_map", "custom_pipelines", "trust_remote_code", "code_revision"),
        *("configuration_files", "fast_tokenizer_files"),
        *("name_or_path", "_name_or_path", "_commit_hash", "gguf_file"),
        *("use_pretrained_backbone", "peft_config", "base_model_name_or_path"),
    }
)
"""Keys by which a configuration chooses what is loaded and run, at any depth of it."""
LAYER_KEYS = ("layers", "n_layer", "depth")
"""Ends of the names of numbers of layers, in configurations of all families."""
CONFIGURATIONS = ("config.json", "tokenizer_config.json")


def without_code(config: Mapping[str, Any], *, paths: bool = False) -> dict[str, Any]:
    """A configuration without :data:`CODE_KEYS`; with ``paths``, also without names of files."""

    def kept(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: kept(v) for k, v in value.items() if not dropped(k)}
        return [kept(each) for each in value] if isinstance(value, list) else value

    def dropped(key: str) -> bool:
        return key in CODE_KEYS or (paths and key.endswith("_file"))

    found: dict[str, Any] = kept(config)
    return found


def check_layers(config: Any) -> None:
    """Raise ValueError for a number of layers, at any depth, that no model of a swarm has."""
    for key, value in config.items() if isinstance(config, Mapping) else ():
        if key.endswith(LAYER_KEYS) and isinstance(value, int) and not -1 <= value <= LAYERS_MAX:
            raise ValueError(f"it says {key[:40]} {str(value)[:40]}; the limit is {LAYERS_MAX}")
        check_layers(value)
    for each in config if isinstance(config, list) else ():
        check_layers(each)


@contextmanager
def read_by_library(directory: Path, names: Collection[str]) -> Iterator[Path]:
    """A directory with those of a model's files ``names`` that there are, for a library to read.

    Configurations are written anew, :func:`without_code` and without paths. Raises ValueError and
    OSError.
    """
    with TemporaryDirectory(prefix="anabranch-model-") as made:
        copy = Path(made)
        for name in names:
            file = directory / name
            if not file.is_file():
                continue
            if name in CONFIGURATIONS:
                said = without_code(read_object(file), paths=name != "config.json")
                check_layers(said)
                (copy / name).write_text(json.dumps(said))
            else:
                shutil.copyfile(file, copy / name)
        yield copy
