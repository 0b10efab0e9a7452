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

from dht.messages.types import RECORD_BOUNDS
from dht.process.json_file import read_object

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
ROPE_KEYS = ("rope_scaling", "rope_parameters")
ROPE_NUMBERS = frozenset(
    {"factor", "rope_theta", "original_max_position_embeddings", "attention_factor", "beta_fast",
     "beta_slow", "low_freq_factor", "high_freq_factor", "partial_rotary_factor"}
)  # fmt: skip
"""Rotary settings that are numbers above 0; transformers computes with whatever they are."""
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


def check_numbers(config: Any, *, rotary: bool = False) -> None:
    """Raise ValueError for a number of layers, at any depth, that no model of a swarm has, and for
    rotary settings that are no numbers; ``rotary``: whether ``config`` is within those."""
    for key, value in config.items() if isinstance(config, Mapping) else ():
        if (
            key.endswith(LAYER_KEYS)
            and isinstance(value, int)
            and not -1 <= value <= RECORD_BOUNDS.layers_max
        ):
            raise ValueError(
                f"it says {key[:40]} {str(value)[:40]}; the limit is {RECORD_BOUNDS.layers_max}"
            )
        known = value is None or (type(value) in (int, float) and value > 0)
        if rotary and key in ROPE_NUMBERS and not known:
            told = repr(value)[:40]
            raise ValueError(f"it says {key} {told} of its rotary positions, no number above 0")
        check_numbers(value, rotary=rotary or key in ROPE_KEYS)
    for each in config if isinstance(config, list) else ():
        check_numbers(each)


def key_words(error: KeyError, config: Mapping[str, Any]) -> str:
    """What a library's KeyError says of a configuration: which of its values is unknown, what it
    lacks, or the library's own sentence."""
    key = error.args[0] if error.args else None
    if isinstance(key, str) and " " in key:
        return " ".join(key.split())[:1000]
    for place in _said_at(config, key):
        return f"transformers does not know {str(key)[:60]!r} as its {place}"
    return f"transformers looks for {str(key)[:60]!r} in vain"


def _said_at(config: Mapping[str, Any], value: object) -> Iterator[str]:
    """Keys of a configuration, and of those within it, that have this value; none for null."""
    for key, said in config.items() if value is not None else ():
        if isinstance(said, Mapping):
            yield from (f"{key}.{inner}" for inner in _said_at(said, value))
        elif type(said) is type(value) and said == value:
            yield key


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
                check_numbers(said)
                (copy / name).write_text(json.dumps(said))
            else:
                shutil.copyfile(file, copy / name)
        yield copy
